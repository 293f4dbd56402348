"""`python -m zeroxla`: the command `zeroxla`."""

import sys

from zeroxla.cli.main import main

sys.exit(main())
