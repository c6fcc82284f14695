"""`python -m micsctl` is `micsctl`."""

from micsctl.cli.app import main

main()
