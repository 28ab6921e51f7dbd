"""Train the classifiers that come with the package and write their weights: ``python scripts/train_models.py [NAME ...]``.

Seeded. The weights are rounded to float16 before the accuracy is measured, since that is what is shipped. The digits
models take half a minute on a GPU and well over ten minutes on two CPU cores. The Fashion-MNIST models took three and four
minutes on a GPU and need one, and the idx files of that data set. Another device ends at slightly different weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from qflash_lab.evaluation.real_data import FASHION_FOLDERS
from qflash_lab.evaluation.small_models import MODELS, Split, build_model, load_images, predict_logits

WEIGHTS = Path(__file__).resolve().parents[1] / "lab" / "src" / "qflash_lab" / "weights"
FULL_TOKEN_EPOCHS = 10
"""Where patches are dropped, three quarters are, at a quarter of the cost, until this many epochs before the end."""
SHIFT = 2
"""Pixels that images of clothes are moved by, at most."""


def move_digits(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift (up to half a pixel), turn (up to 8 degrees) and scale (10 %) each image; shape and dtype stay."""
    count = images.shape[0]
    shift, turn, size = (torch.rand(count, n, generator=generator) * 2.0 - 1.0 for n in (2, 1, 1))
    angle = turn[:, 0] * math.radians(8.0)
    zoom = 1.0 + 0.1 * size[:, 0]
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * zoom
    theta[:, 0, 1] = -angle.sin() * zoom
    theta[:, 1, 0] = angle.sin() * zoom
    theta[:, :, 2] = shift / images.shape[-1]
    grid = nn.functional.affine_grid(theta, list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, align_corners=False)


def move_clothes(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mirror half of the images, shift each (up to 2 pixels) and blacken a rectangle in half of them."""
    count, _, height, width = images.shape
    place = images.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator, device=place)

    rows, columns = (
        (torch.floor(draw(1) * (2 * SHIFT + 1)).long() + torch.arange(side, device=place)) for side in (height, width)
    )
    columns = torch.where(draw(1) < 0.5, columns, columns.flip(1))
    padded = nn.functional.pad(images[:, 0], (SHIFT, SHIFT, SHIFT, SHIFT))
    moved = padded[torch.arange(count, device=place)[:, None, None], rows[:, :, None], columns[:, None, :]]
    first, size = draw(2), 0.1 + 0.3 * draw(2)
    along = [
        ((torch.arange(side, device=place) - side * first[:, axis, None]) / side) for axis, side in enumerate((height, width))
    ]
    inside = [(x >= 0) & (x < size[:, axis, None]) for axis, x in enumerate(along)]
    erased = inside[0][:, :, None] & inside[1][:, None, :] & (draw(1, 1) < 0.5)
    return moved.masked_fill(erased, 0.0).unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        epochs: passes over the training images.
        batch: images a step.
        rate: largest learning rate.
        decay: weight decay of matrices.
        smoothing: of the labels.
        augment: changes images at random.
        drops_patches: see :data:`FULL_TOKEN_EPOCHS`.
        on_device: images lie on the device, and on a GPU products are of bfloat16; else on the CPU and of float32.
    """

    epochs: int
    batch: int
    rate: float
    decay: float
    smoothing: float
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    drops_patches: bool = False
    on_device: bool = False


TRAININGS = {
    "digits-vit": Training(120, 32, 1.5e-3, 0.05, 0.05, move_digits, drops_patches=True),
    "digits-swin": Training(40, 32, 1.5e-3, 0.05, 0.05, move_digits),
    "fashion-vit": Training(45, 512, 1.5e-3, 0.1, 0.1, move_clothes, on_device=True),
    "fashion-swin": Training(22, 512, 1.5e-3, 0.1, 0.1, move_clothes, on_device=True),
}


def train(name: str, data: Split, epochs: int | None, device: torch.device, output: Path, console: Console) -> None:
    """Train one model, print its accuracy on the images it was not trained on and write its weights."""
    how = TRAININGS[name]
    epochs = epochs or how.epochs
    place = device if how.on_device else torch.device("cpu")
    torch.manual_seed(0)
    generator = torch.Generator(place).manual_seed(0)
    images, labels = data.train_images.to(place), data.train_labels.to(place)
    model = build_model(name).to(device)
    if how.drops_patches:
        from timm.layers import PatchDropout

        model.backbone.patch_drop = PatchDropout(0.75, num_prefix_tokens=1)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": how.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    steps = epochs * math.ceil(len(images) / how.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=how.rate, total_steps=steps, pct_start=0.15)
    half = torch.autocast(device.type, torch.bfloat16, enabled=how.on_device and device.type == "cuda")
    start = time.monotonic()
    for epoch in range(epochs):
        if how.drops_patches and epoch == epochs - FULL_TOKEN_EPOCHS:
            model.backbone.patch_drop = nn.Identity()
        # added up on the device: reading each step's loss would wait for it
        total = torch.zeros((), device=device)
        for chosen in torch.randperm(len(images), generator=generator, device=place).split(how.batch):
            batch = how.augment(images[chosen], generator).to(device)
            with half:
                logits = model(batch)
            loss = nn.functional.cross_entropy(logits.float(), labels[chosen].to(device), label_smoothing=how.smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(chosen)
        seconds = time.monotonic() - start
        console.print(f"{name} epoch {epoch + 1}/{epochs}: loss {total.item() / len(images):.4f}, {seconds:.0f} s")
    model.eval()
    state = {key: value.half().cpu().contiguous() for key, value in model.state_dict().items()}
    model.load_state_dict({key: value.float() for key, value in state.items()})
    logits = predict_logits(model, data.images.to(device), 256)
    right = int((logits.argmax(1).cpu() == data.labels).sum())
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.safetensors"
    save_file(state, path)
    percent = 100 * right / len(data.labels)
    console.print(f"{name}: {right}/{len(data.labels)} held-out images right ({percent:.2f} %)")
    console.print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[], help=f"any of {', '.join(MODELS)}; all if none is named")
    parser.add_argument("--epochs", type=int, help="passes over the training images; each model's own if not given")
    parser.add_argument("--limit", type=int, help="only so many images to train on and to judge by")
    parser.add_argument("--fashion", type=Path, default=Path(FASHION_FOLDERS[0]), help="folder of Fashion-MNIST's idx files")
    parser.add_argument(
        "--output", type=Path, default=WEIGHTS, help="where the weights go; the package's own folder if not given"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.models or MODELS:
        dataset = MODELS[name].dataset
        data = load_images(dataset, options.fashion if dataset == "fashion" else None)
        data = Split(*(getattr(data, field.name)[: options.limit] for field in dataclasses.fields(data)))
        train(name, data, options.epochs, device, options.output, Console())


if __name__ == "__main__":
    main()
