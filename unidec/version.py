"""The version, and the folder of the package."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
