"""The page to try a model in, and the content security policy for it."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page for a model. facts: the constant `facts` of its script."""
    page = files("jaxpar.serve").joinpath("page.html").read_text("utf-8")
    return page.replace("{{facts}}", json.dumps(facts).replace("<", "\\u003c"))


def security_headers(page: str) -> list[tuple[str, str]]:
    """Return headers for all answers: a browser runs no script but that of the page, and shows it in no frame."""

    def hashes(tag: str) -> str:
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in texts)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [("Content-Security-Policy", policy), ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")]
