"""Checks for pretrained models of the examples: a local directory, or the hub if it is reachable."""

import os
import urllib.error
import urllib.request
from pathlib import Path


def pretrained_errors(name_or_path: str | None) -> list[str]:
    """Return an error if a model is neither a local directory nor available from the hub."""
    if name_or_path is None or Path(name_or_path).is_dir() or hub_is_reachable():
        return []
    return [
        f"--model_name_or_path {name_or_path} is no directory here, and the Hugging Face hub cannot be reached: "
        "give a local directory of a pretrained model, or leave it out for a small new one"
    ]


def hub_is_reachable(timeout_seconds: float = 5.0) -> bool:
    """Return True if the hub answers. Its own client would retry for nearly a minute before it fails."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        # An HTTP request rather than a socket: it uses the proxy of the environment, as the client does.
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
