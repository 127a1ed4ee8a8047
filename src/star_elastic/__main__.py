"""``python -m star_elastic`` is the same as ``star-elastic``."""

import sys

from star_elastic.cli import main

sys.exit(main())
