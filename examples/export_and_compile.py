"""A patched model through torch.compile, torch.export and AOTInductor."""

import argparse
import tempfile
from pathlib import Path

import timm
import torch

import qflash  # also needed where an exported program is loaded

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--package", action="store_true", help="also compile to a package by AOTInductor; takes a minute on a CPU")
given = parser.parse_args()

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
images = torch.randn(2, 3, 32, 32)
qflash.patch(model)

with torch.inference_mode():
    logits = model(images)

# the batch stays open; "eager" only traces, leave it out for Inductor
compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
with torch.inference_mode():
    print("torch.compile:", torch.equal(compiled(images), logits))

batch = torch.export.Dim("batch", min=1, max=64)
with torch.no_grad():
    program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    print("torch.export:", torch.equal(loaded(images), logits), tuple(loaded(images[:1]).shape))
    if given.package:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "package.pt2"))
        runner = torch._inductor.aoti_load_package(package)
        print("AOTInductor:", torch.allclose(runner(images), logits, atol=1e-4))
