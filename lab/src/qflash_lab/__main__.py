"""``python -m qflash_lab``."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="qflash-lab")
