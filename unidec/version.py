"""The version, and the folder of the package."""

from pathlib import Path

__version__ = "1.0.0"
PACKAGE = Path(__file__).parent
