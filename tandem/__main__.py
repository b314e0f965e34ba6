"""`python -m tandem` is `tandem`."""

from tandem.cli import main

main()
