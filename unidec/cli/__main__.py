"""`python -m unidec.cli`."""

from unidec.cli import main

main()
