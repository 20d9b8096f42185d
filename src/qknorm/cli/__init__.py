"""The command line: `qknorm VERB …`, one file a verb."""

from qknorm.cli.main import main

__all__ = ["main"]
