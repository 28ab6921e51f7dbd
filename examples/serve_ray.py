"""An integer network behind HTTP with Ray Serve: images in, the likeliest classes or an embedding out.

    python examples/serve_ray.py vit.safetensors --replicas 2 --deadline 1
    curl --data-binary @photo.jpg "http://127.0.0.1:8000/classes?top=3"
    curl --data-binary @photo.jpg http://127.0.0.1:8000/embedding

Ray Serve keeps replicas of the network, one for each GPU or on CPU cores, gathers requests into batches and replaces replicas
that die. The HTTP server in this process passes requests on and keeps one promise: within ``--deadline`` seconds a request has
its answer (200), is refused for good (400, 413: not an image), or may be sent again (429 if too many are waiting, 503 if the
deadline would pass; both with Retry-After). Ray Serve's own server does not promise that: it answers 408 behind its timeout
and 500 where a replica died. A request whose replica dies is given to another one, which computes the same integers.
"""

import argparse
import asyncio
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import ray
import torch
import uvicorn
from PIL import Image
from ray import serve
from ray.exceptions import RayActorError, RayError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import qflash
from qflash.network.graph import IntegerNetwork

LARGEST = 20 << 20
"""Bytes of an image file that is taken."""
MARGIN = 0.8
"""Share of the deadline after which a request is given up; the rest is for the answer's way to the client."""


@serve.deployment
class Replica:
    """One copy of the network, captured for one batch size."""

    def __init__(self, file: str, batch: int, wait: float) -> None:
        network = qflash.load_model(file, "cuda" if ray.get_gpu_ids() else "cpu")
        self.size, self.run = batch, network.graph(batch)
        plain = {"input_size": network.image, "mean": [0.5], "std": [0.5], "crop_pct": 1.0}
        self.transform = qflash.image_transform(network.about.get("images") or plain, network.image[1:])
        self.compute.set_max_batch_size(batch)
        self.compute.set_batch_wait_timeout_s(wait)

    async def __call__(self, content: bytes) -> list[int] | str:
        """Return the network's integers for an image file, or why it cannot be decoded."""
        try:
            pixels = await asyncio.to_thread(self.decode, content)
        except Exception as error:  # whatever a damaged file makes of the decoder
            return f"{type(error).__name__}: {error}"
        return await self.compute(pixels)

    def decode(self, content: bytes) -> torch.Tensor:
        return self.transform(Image.open(io.BytesIO(content)))

    @serve.batch
    async def compute(self, pixels: list[torch.Tensor]) -> list[list[int]]:
        """Run the network on what has gathered; requests that were given up meanwhile are no longer among it."""
        return await asyncio.to_thread(self.forward, pixels)

    @torch.inference_mode()
    def forward(self, pixels: list[torch.Tensor]) -> list[list[int]]:
        missing = [torch.zeros_like(pixels[0])] * (self.size - len(pixels))
        return self.run(torch.stack([*pixels, *missing]))[: len(pixels)].tolist()


class Server:
    """Passes requests on to replicas, and gives up those whose time is over.

    Args:
        replicas: Ray Serve's handle.
        network: its labels and units.
        deadline: seconds.
        first, most: requests that may be in work or waiting, at first and at most. Between, the number is halved when
            deadlines pass and grows with answers, as a sender's window does in TCP: so that what waits can be done in time,
            however many replicas live and however fast they are.
    """

    def __init__(self, replicas: Any, network: IntegerNetwork, deadline: float, first: int, most: int) -> None:
        self.replicas, self.deadline, self.most = replicas, deadline, most
        self.waiting, self.limit, self.halved = 0, float(min(first, most)), -math.inf
        (name,) = network.outputs
        self.unit, self.labels = network.scales[name], network.about.get("labels") or []

    def later(self, status: int, why: str) -> Response:
        """Return what says that the request may be sent again."""
        return JSONResponse({"error": why}, status, {"Retry-After": str(math.ceil(self.deadline))})

    async def take(self, request: Request) -> Response:
        """Answer a request, whatever happens to the replicas."""
        if self.waiting >= self.limit:
            return self.later(429, f"{self.waiting} requests are waiting")
        self.waiting += 1
        end = time.monotonic() + MARGIN * self.deadline
        try:
            content = await asyncio.wait_for(self.read(request), end - time.monotonic())
            if isinstance(content, Response):
                return content
            found = await self.compute_until(end, content)
            return self.shown(request, found)
        except asyncio.TimeoutError:
            return self.later(503, f"not done within {self.deadline} s")
        except RayError as error:
            return self.later(503, f"a replica failed: {type(error).__name__}")
        finally:
            self.waiting -= 1

    async def read(self, request: Request) -> bytes | Response:
        """Return the image file of a request, or what is wrong with the request."""
        top = request.query_params.get("top", "5")
        if not (len(top) < 10 and top.isdecimal() and int(top) > 0):
            return JSONResponse({"error": f"top must be a positive integer, got {top[:20]!r}"}, 400)
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > LARGEST:
                return JSONResponse({"error": f"an image file may have {LARGEST} bytes"}, 413)
        return content

    async def compute_until(self, end: float, content: bytes) -> list[int] | str:
        """Return what a replica makes of an image, and adapt how many requests may wait to whether it is done in time."""
        try:
            found = await asyncio.wait_for(self.compute(content), end - time.monotonic())
        except asyncio.TimeoutError:
            now = time.monotonic()
            if now - self.halved > self.deadline:  # once for all that were taken in together
                self.limit, self.halved = max(self.limit / 2, 1.0), now
            raise
        self.limit = min(self.limit + 1 / self.limit, self.most)
        return found

    def shown(self, request: Request, found: list[int] | str) -> Response:
        """Return the answer to a request."""
        if isinstance(found, str):
            return JSONResponse({"error": f"no image: {found}"}, 400)
        if request.url.path == "/embedding":
            return JSONResponse({"embedding": found, "unit": self.unit})
        top = int(request.query_params.get("top", "5"))
        places = sorted(range(len(found)), key=found.__getitem__, reverse=True)[:top]
        called = [self.labels[place] if place < len(self.labels) else str(place) for place in places]
        rows = [{"class": x, "logit": found[place] * self.unit} for x, place in zip(called, places, strict=True)]
        return JSONResponse({"classes": rows})

    async def compute(self, content: bytes) -> list[int] | str:
        """Return what a replica makes of an image; of another one where the first died with it."""
        while True:
            response = self.replicas.remote(content)
            try:
                return await response
            except RayActorError:
                await asyncio.sleep(0.01)  # until Ray Serve no longer offers the dead one
            except asyncio.CancelledError:
                response.cancel()  # its place in a batch is for others
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path, help="file of an integer network with one output (images, channels)")
    parser.add_argument("--replicas", type=int, help="one for each GPU, or for each core, if left out")
    parser.add_argument("--batch", type=int, default=8, help="images a call of the network")
    parser.add_argument("--wait", type=float, default=0.005, help="seconds that a batch waits for more images")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds")
    parser.add_argument("--most", type=int, help="requests in work or waiting; eight batches for each replica if left out")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    network = qflash.load_model(given.network)
    shapes = [network.shapes()[node] for node in network.outputs.values()]
    if len(shapes) != 1 or len(shapes[0]) != 2:
        parser.error(f"network must have one output (images, channels), has {dict(zip(network.outputs, shapes, strict=True))}")
    if min(given.batch, given.replicas or 1, given.most or 1) < 1 or given.deadline <= 0 or given.wait < 0:
        parser.error("--batch, --replicas, --most and --deadline must be positive, --wait must not be negative")

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    on_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    replicas = given.replicas or int(ray.cluster_resources()["GPU" if on_gpu else "CPU"])
    serve.start(proxy_location="Disabled")
    deployment = Replica.options(
        num_replicas=replicas,
        ray_actor_options={"num_gpus": 1} if on_gpu else {"num_cpus": 0.5},
        max_ongoing_requests=2 * given.batch,  # one batch is computed while the next one gathers
        health_check_period_s=1,
    )
    handle = serve.run(deployment.bind(str(given.network.resolve()), given.batch, given.wait), name="qflash", route_prefix=None)
    at_once = given.batch * replicas
    server = Server(handle, network, given.deadline, at_once, given.most or 8 * at_once)
    routes = [Route(path, server.take, methods=["POST"]) for path in ("/classes", "/embedding")]
    print(json.dumps({"url": f"http://{given.host}:{given.port}", "replicas": replicas, "device": "gpu" if on_gpu else "cpu"}))
    uvicorn.run(Starlette(routes=routes), host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
