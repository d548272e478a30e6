"""All fuzz targets, by name."""

from __future__ import annotations

from tests.fuzz import calls, files, records, texts

TARGETS = {
    target.name: target for module in (records, files, calls, texts) for target in module.TARGETS
}
