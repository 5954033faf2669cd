"""Hours rather than minutes: collected only by ``make soak``, which sets ``TANDEM_SOAK``."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TANDEM_SOAK") else ["test_*"]
