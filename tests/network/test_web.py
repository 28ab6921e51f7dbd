"""What ``qflash.export_web`` writes: in node and in a browser the network gives Python's integers."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import pathlib
import queue
import shlex
import shutil
import subprocess
import threading
import urllib.parse
from typing import Any

import pytest
import torch

import cpu_driver
import qflash
from golden_cases import FILES, cases_of, differing, needs_golden, require_equal
from qflash.kernels.cpu import launch
from qflash.network import c_export, web_export
from small_networks import draw

NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
HAS_ZIG = importlib.util.find_spec("ziglang") is not None or shutil.which("zig") is not None
needs_zig = pytest.mark.skipif(not HAS_ZIG, reason="needs Zig's compiler: pip install ziglang")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")
KINDS = ("class token", "features", "SwiGLU with a norm", "grey", "rotary and norms", "swin", "swin v2", "long rows")


@pytest.fixture(scope="module")
def page(made: Any, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("page")
    qflash.export_web(made("class token")[1], folder, name="Class token, 2 blocks")
    return folder


def run(folder: pathlib.Path, script: str) -> Any:
    """Run a module of JavaScript beside the page; return what it prints as JSON."""
    (folder / "test.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run([str(NODE), "test.mjs"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


COMPUTE = """
import { readFileSync } from "node:fs";
import { Network } from "./qflash.js";
const network = await Network.load({ weights: "other.bin" });
const pixels = new Uint8Array(readFileSync("images.raw"));
const size = network.shape.reduce((a, b) => a * b, 1);
const all = [];
for (let at = 0; at < pixels.length; at += size) all.push(network.run(pixels.subarray(at, at + size)));
const flat = all.map((out) => Object.fromEntries(Object.entries(out).map(([k, x]) => [k, { ...x, values: [...x.values] }])));
console.log(JSON.stringify({ shape: network.shape, outputs: flat }));
"""


@needs_node
@needs_zig
@pytest.mark.parametrize("kind", KINDS)
def test_node_computes_the_networks_integers(made: Any, page: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    model, network = made(kind)
    images = draw(model, 3, seed=22)
    c_export.write_program(network, tmp_path)
    shutil.copyfile(tmp_path / "network.bin", page / "other.bin")
    (page / "images.raw").write_bytes(images.numpy().tobytes())
    found = run(page, COMPUTE)
    assert found["shape"] == [1, *network.image]
    for image, outputs in zip(images, found["outputs"], strict=True):
        assert list(outputs) == list(network.outputs)
        for name, wanted in network.run(image[None]).items():
            assert outputs[name]["shape"] == list(wanted.shape) and outputs[name]["scale"] == network.scales[name]
            assert outputs[name]["values"] == wanted.flatten().tolist()


MISUSE = """
import { readFileSync } from "node:fs";
import { Network } from "./qflash.js";
const code = readFileSync("qflash.wasm"), content = new Uint8Array(readFileSync("network.bin"));
const said = [];
const attempt = async (action) => said.push(await action().then(() => "nothing", (error) => `${error.name}: ${error.message}`));
const progress = [];
const network = await Network.load({ progress: (x) => progress.push(x) });
const pixels = new Uint8Array(network.shape.reduce((a, b) => a * b, 1));
await attempt(async () => network.run(pixels.subarray(1)));
await attempt(async () => network.run([...pixels]));
network.close();
network.close();
await attempt(async () => network.run(pixels));
for (const place of [0, 8, 100, content.length - 100]) {
  const damaged = content.slice();
  damaged[place] ^= 1;
  await attempt(() => Network.from(code, damaged));
}
await attempt(() => Network.from(code, content.subarray(0, 16)));
await attempt(() => Network.from(code, "network.bin"));
await attempt(() => Network.load({ weights: "missing.bin" }));
console.log(JSON.stringify({ said, progress, bytes: content.length }));
"""


@needs_node
@needs_zig
def test_misuse_is_an_error_with_words(page: pathlib.Path) -> None:
    found = run(page, MISUSE)
    count = 3 * 32 * 32
    expected = [
        f"RangeError: pixels must be {count} numbers (1 x 3 x 32 x 32), got {count - 1}",
        "TypeError: pixels must be a Uint8Array or Uint8ClampedArray",
        "NetworkError: the network was closed",
        "NetworkError: the file is no network of qflash.export_c",
        *["NetworkError: the file is damaged"] * 3,
        "NetworkError: the file is no network of qflash.export_c",
        "TypeError: content must be a Uint8Array",
    ]
    assert found["said"][:-1] == expected
    assert "missing.bin" in found["said"][-1]
    assert found["progress"][-1] == {"loaded": found["bytes"], "total": found["bytes"]}


HELPERS = """
import { largest, planes } from "./qflash.js";
const rgba = Uint8ClampedArray.from([1, 2, 3, 255, 10, 20, 30, 255]);
console.log(JSON.stringify([largest([5, -1, 5, 9], 3, 0.5), [...planes(rgba, 3)], [...planes(rgba, 1)]]));
"""


@needs_node
def test_pixels_and_the_largest_outputs(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(c_export.__file__).parents[1] / "kernels" / "cpu" / "program" / "web" / "qflash.js"
    shutil.copyfile(source, tmp_path / "qflash.js")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    largest, colours, grey = run(tmp_path, HELPERS)
    probabilities = torch.tensor([2.5, -0.5, 2.5, 4.5], dtype=torch.float64).softmax(0)
    assert [(x["index"], x["logit"]) for x in largest] == [(3, 4.5), (0, 2.5), (2, 2.5)]
    assert [x["probability"] for x in largest] == pytest.approx(probabilities[[3, 0, 2]].tolist())
    assert colours == [1, 10, 2, 20, 3, 30] and grey == [2, 18]


@needs_zig
def test_the_folder_is_a_package_with_an_example(made: Any, page: pathlib.Path) -> None:
    network = made("class token")[1]
    package = json.loads((page / "package.json").read_text(encoding="utf-8"))
    assert package["name"] == "class-token-2-blocks" and package["exports"]["."]["default"] == "./qflash.js"
    assert all((page / name).stat().st_size for name in package["files"])
    about = json.loads((page / "network.json").read_text(encoding="utf-8"))
    example = torch.frombuffer(bytearray((page / "example.bin").read_bytes()), dtype=torch.uint8).view(1, *network.image)
    assert about["example"] == {name: x.flatten().tolist() for name, x in network.run(example).items()}
    assert about["bytes"] == (page / "network.bin").stat().st_size
    assert len(example.unique()) > 30


WATCH = """
<iframe src="index.html"></iframe>
<script>
  const watch = setInterval(() => {
    const document = window.frames[0].document;
    const proof = document.getElementById("proof"), name = document.getElementById("name");
    if (!proof || proof.className === "quiet") return;
    clearInterval(watch);
    fetch("said?" + encodeURIComponent([name.textContent, proof.className, proof.textContent].join("|")));
  }, 50);
</script>
"""


def browse(folder: pathlib.Path, profile: pathlib.Path, name: str = "watch.html") -> list[str]:
    """Open a folder's page in Chromium; return what it fetches as "said?", in parts."""
    said: queue.Queue[str] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            if "/said?" in self.path:
                said.put(urllib.parse.unquote(self.path.partition("?")[2]))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        address = f"http://127.0.0.1:{server.server_port}/{name}"
        with subprocess.Popen(
            [str(CHROMIUM), *options, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as browser:
            try:
                return said.get(timeout=240).split("|")
            finally:
                browser.terminate()
                server.shutdown()


def look(page: pathlib.Path, profile: pathlib.Path) -> list[str]:
    """Open the page in Chromium; return its name, and the class and the text of its proof."""
    (page / "watch.html").write_text(WATCH, encoding="utf-8")
    return browse(page, profile)


IN_NODE = """
import { readFileSync, readSync, writeSync } from "node:fs";
import { run } from "./driver.mjs";
const read = (bytes) => {
  for (;;) {
    try {
      return readSync(0, bytes);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
};
const write = (bytes, file) => {
  for (let at = 0; at < bytes.length; at += writeSync(file, bytes, at));
};
process.exitCode = await run(new WebAssembly.Module(readFileSync("driver.wasm")), read, write);
"""
IN_A_BROWSER = """
<script type="module">
  import { run } from "./driver.mjs";
  const load = async (name) => new Uint8Array(await (await fetch(name)).arrayBuffer());
  const [code, calls, answers] = await Promise.all(["driver.wasm", "calls.bin", "answers.bin"].map(load));
  let at = 0, got = 0, equal = true;
  const read = (bytes) => {
    const more = calls.subarray(at, at + bytes.length);
    bytes.set(more);
    at += more.length;
    return more.length;
  };
  const write = (bytes, file) => {
    if (file === 1) equal &&= bytes.every((x) => x === answers[got++]);
  };
  const status = await run(await WebAssembly.compile(code), read, write);
  fetch("said?" + encodeURIComponent([status, at, got, equal].join("|")));
</script>
"""


@pytest.mark.slow
@needs_node
@needs_zig
@needs_golden
def test_kernels_have_the_committed_bits_in_node_and_in_a_browser(tmp_path: pathlib.Path) -> None:
    kernels = cpu_driver.KERNELS
    flags = shlex.split(web_export._variable((kernels / "program" / "Makefile").read_text(encoding="utf-8"), "FLAGS"))
    sources = [cpu_driver.HERE / "driver.c", *(kernels / name for name in launch._SOURCES)]
    command = [*web_export._compiler(), *flags, "-target", "wasm32-wasi", "-msimd128", f"-I{kernels}", *map(str, sources)]
    subprocess.run([*command, "-o", str(tmp_path / "driver.wasm"), "-lm"], capture_output=True, check=True)
    shutil.copyfile(cpu_driver.HERE / "driver.mjs", tmp_path / "driver.mjs")
    (tmp_path / "node.mjs").write_text(IN_NODE, encoding="utf-8")
    script = f"process.chdir({json.dumps(str(tmp_path))}); await import({json.dumps(str(tmp_path / 'node.mjs'))});"
    library = cpu_driver.DriverLibrary([str(NODE), "--input-type=module", "--eval", script], dict(os.environ), pointer_bytes=4)
    with (
        (tmp_path / "calls.bin").open("wb") as library.record,
        (tmp_path / "answers.bin").open("wb") as library.answers,
        cpu_driver.kernels_in(library),
    ):
        for name in FILES:
            require_equal(differing(cases_of(name), "cpu"), "WebAssembly in node")
    assert library.calls > 200
    if CHROMIUM is None:
        pytest.skip("needs chromium, too; node gave the committed bits")
    (tmp_path / "calls.html").write_text(IN_A_BROWSER, encoding="utf-8")
    sizes = [str((tmp_path / name).stat().st_size) for name in ("calls.bin", "answers.bin")]
    assert browse(tmp_path, tmp_path / "profile", "calls.html") == ["0", *sizes, "true"]
    damaged = bytearray((tmp_path / "answers.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "answers.bin").write_bytes(damaged)
    assert browse(tmp_path, tmp_path / "profile", "calls.html") == ["0", *sizes, "false"]


@pytest.mark.slow
@needs_zig
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_compares_the_example(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = "Class token, 2 blocks"
    assert look(page, tmp_path / "one") == [name, "good", "✓ 10 of 10 outputs of the example equal Python's."]
    damaged = shutil.copytree(page, tmp_path / "damaged")
    whole = (page / "example.bin").read_bytes()
    (damaged / "example.bin").write_bytes(bytes([whole[0] ^ 255]) * 100 + whole[100:])
    found = look(damaged, tmp_path / "two")
    assert found[:2] == [name, "bad"] and found[2].startswith("✗ Only")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"folder": 3}, TypeError, "path must be a string or a path, got int"),
        ({"name": 3}, TypeError, "name must be a string, got int"),
        ({"example": torch.zeros(1, 3, 32, 32)}, TypeError, "uint8"),
        ({"example": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}, ValueError, "example must be one image, got 2"),
    ],
)
def test_arguments_are_checked(
    made: Any, tmp_path: pathlib.Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        made("class token")[1].export_web(**{"folder": tmp_path, **arguments})


def test_a_missing_compiler_is_named(made: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install ziglang"):
        made("class token")[1].export_web(tmp_path / "page")
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    ("images", "crop", "squash"),
    [
        ({}, 1.0, False),
        ({"input_size": [3, 224, 224], "crop_pct": 0.875, "crop_mode": "center"}, 0.875, False),
        ({"input_size": [3, 224, 224], "crop_mode": "squash"}, 1.0, True),
        ({"size": {"height": 224, "width": 224}, "do_center_crop": None}, 1.0, True),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}, 0.875, False),
    ],
)
def test_cropping_is_that_of_the_model(images: dict[str, Any], crop: float, squash: bool) -> None:
    assert web_export._cropping(images) == (crop, squash)
