"""Models of other libraries that attend with QFlash: timm, transformers, Swin's bias."""
