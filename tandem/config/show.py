"""A value as messages show it: the way YAML would write it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tandem.config.schema import Plain

_BARE = re.compile(r"(?!(null|true|false|yes|no|on|off|default)$)[A-Za-z_/.~-][\w/.~-]*", re.IGNORECASE)


def shown(value: Plain) -> str:
    """One line; text carries quotes only where it could be taken for something else."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(map(shown, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
        case _:
            return str(value)
