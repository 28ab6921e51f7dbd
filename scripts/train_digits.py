"""Train the two digits classifiers and write their weights: ``python scripts/train_digits.py [vit] [swin]``.

Seeded. The shipped weights took 21 s (ViT) and 14 s (Swin) on an NVIDIA H200; two CPU cores need well over ten
minutes, and end at slightly different weights. They are rounded to float16 before the accuracy is measured, since
that is what is shipped.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import nn

from qflash.evaluation.digits import MODELS, build_model, load_digits_split, predict_logits

WEIGHTS = Path(__file__).resolve().parents[1] / "src" / "qflash" / "weights"
FULL_TOKEN_EPOCHS = 10
"""The ViT sees a quarter of its patches, at a quarter of the cost, until this many epochs before the end."""


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
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


def train(name: str, epochs: int, device: torch.device, output: Path, console: Console) -> None:
    """Train one model, print its held-out accuracy and write its weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels, test_images, test_labels = load_digits_split()
    model = build_model(name).to(device)
    if name == "vit":
        from timm.layers import PatchDropout

        model.backbone.patch_drop = PatchDropout(0.75, num_prefix_tokens=1)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    batch = 32
    steps = epochs * math.ceil(len(images) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.5e-3, total_steps=steps, pct_start=0.15)
    start = time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task(name, total=steps)
        for epoch in range(epochs):
            if name == "vit" and epoch == epochs - FULL_TOKEN_EPOCHS:
                model.backbone.patch_drop = nn.Identity()
            total = 0.0
            for chosen in torch.randperm(len(images), generator=generator).split(batch):
                logits = model(augment(images[chosen], generator).to(device))
                loss = nn.functional.cross_entropy(logits, labels[chosen].to(device), label_smoothing=0.05)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                total += loss.item() * len(chosen)
                progress.advance(task)
            console.print(
                f"{name} epoch {epoch + 1}/{epochs}: loss {total / len(images):.4f}, {time.monotonic() - start:.0f} s"
            )
    model = model.cpu().eval()
    state = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    model.load_state_dict({key: value.float() for key, value in state.items()})
    right = (predict_logits(model, test_images).argmax(1) == test_labels).sum().item()
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"digits-{name}.safetensors"
    save_file(state, path)
    console.print(f"{name}: {right}/{len(test_labels)} held-out images right ({100 * right / len(test_labels):.2f} %)")
    console.print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[], help=f"any of {', '.join(MODELS)}; all if none is named")
    parser.add_argument("--vit-epochs", type=int, default=120)
    parser.add_argument("--swin-epochs", type=int, default=40)
    parser.add_argument(
        "--output", type=Path, default=WEIGHTS, help="where the weights go; the package's own folder if not given"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    epochs = {"vit": options.vit_epochs, "swin": options.swin_epochs}
    for name in options.models or MODELS:
        train(name, epochs[name], device, options.output, Console())


if __name__ == "__main__":
    main()
