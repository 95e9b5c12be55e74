"""What tests read of pages."""

from __future__ import annotations

import json
import re
from typing import Any


def data_of(html: str) -> dict[str, Any]:
    """What a page draws."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)
