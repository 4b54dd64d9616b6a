"""`python -m hyperdflash COMMAND`: the same as the console script."""

from hyperdflash.generation.cli import main

raise SystemExit(main())
