"""Pretrained models for the examples: from a local directory, or from the hub where it can be reached."""

import os
import urllib.error
import urllib.request
from pathlib import Path


def pretrained_errors(name_or_path: str | None) -> list[str]:
    """Why a model cannot be had: it is no directory here, and the hub cannot be asked for it."""
    if name_or_path is None or Path(name_or_path).is_dir() or hub_is_reachable():
        return []
    return [
        f"--model_name_or_path {name_or_path} is no directory here, and the Hugging Face hub cannot be reached: "
        "give a local directory of a pretrained model, or leave it out for a small new one"
    ]


def hub_is_reachable(timeout_seconds: float = 5.0) -> bool:
    """Return True if the hub answers. Its client retries for nearly a minute before it says that it does not."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        # By HTTP and not by a socket of our own: it goes through the proxy of the environment, as the client does.
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=timeout_seconds).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
