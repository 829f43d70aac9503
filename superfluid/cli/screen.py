"""What may be written to a terminal."""

import re

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters but tab and newline: a model's text does not drive the terminal."""
