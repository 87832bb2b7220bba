"""Which peers are installed, and what to install for the others."""

from importlib import import_module, metadata
from importlib.util import find_spec

# {peer: (its name for readers, the packages that it needs)}
PEERS = {
    "jax": ("JAX", ("jax", "jaxlib")),
    "onnxruntime": ("ONNX Runtime", ("onnxruntime", "onnx")),
    "ctranslate2": ("CTranslate2", ("ctranslate2",)),
}


def title(peer):
    """Returns a provider's name for readers."""
    return PEERS[peer][0] if peer in PEERS else peer


def missing(peer):
    """Returns the packages of a peer that are not installed."""
    return [package for package in PEERS[peer][1] if not find_spec(package)]


def sentence(peer):
    """Says in a sentence what to install for a peer; "" where nothing is missing."""
    packages = missing(peer)
    if not packages:
        return ""
    return (
        f"{title(peer)} is left out, because {' and '.join(packages)} cannot be imported: "
        f"pip install {' '.join(packages)}, or pip install --no-build-isolation '.[peers]' for all "
        "peers"
    )


def load(peer):
    """Returns the module of this folder that calls a peer."""
    return import_module(f"bench.peers.{peer}_calls")


def versions(peers):
    """Returns {package: version} of these peers."""
    return {package: metadata.version(package) for peer in peers for package in PEERS[peer][1]}
