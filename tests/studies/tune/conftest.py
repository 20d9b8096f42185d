"""Lets these tests use the small data and settings of the tests beside this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
