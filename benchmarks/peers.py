"""The peers, each as two functions over {name: leaf}: how an expert who wants speed would call the library.

A peer is prepared in the child process that measures it, so only what it needs is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import raw, tensorstore_peer
from benchmarks.states import Array, Spec, State, flatten, nest


def _unchanged(leaf: Array) -> Any:
    return leaf


@dataclass(frozen=True, slots=True)
class Peer:
    """`place` makes of a numpy leaf what the peer saves; `load` gives back every leaf of the spec."""

    save: Callable[[str, State], None]
    load: Callable[[str, Spec], State]
    place: Callable[[Array], Any] = _unchanged


def _tailrace(memory_budget: str) -> Peer:
    import tailrace

    def save(path: str, state: State) -> None:
        tailrace.save(path, nest(state), memory_budget=memory_budget)

    def load(path: str, _spec: Spec) -> State:
        return flatten(tailrace.load(path, memory_budget=memory_budget))

    return Peer(save, load)


def _tailrace_jax(memory_budget: str) -> Peer:
    import tailrace

    def save(path: str, state: State) -> None:
        tailrace.save(path, nest(state), memory_budget=memory_budget)

    def load(path: str, spec: Spec) -> State:
        return flatten(tailrace.load(path, like=abstract(spec), memory_budget=memory_budget))

    return Peer(save, load, on_device)


def _orbax(_memory_budget: str, *, compression: bool) -> Peer:
    """The class most scripts use, with the handler's own switches: OCDBT and zarr3 as v1 has them."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=compression)
    checkpointer = ocp.Checkpointer(handler)

    def save(path: str, state: State) -> None:
        checkpointer.save(path, args=ocp.args.PyTreeSave(nest(state)))

    def load(path: str, spec: Spec) -> State:
        like = abstract(spec)
        restore = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        return flatten(checkpointer.restore(path, args=restore))

    return Peer(save, load, on_device)


def _orbax_v1(_memory_budget: str, *, compression: bool) -> Peer:
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = compression
    context.__enter__()  # for as long as the process lives

    def save(path: str, state: State) -> None:
        ocp.save(path, nest(state))

    def load(path: str, spec: Spec) -> State:
        return flatten(ocp.load(path, abstract(spec)))

    return Peer(save, load, on_device)


def _safetensors(_memory_budget: str) -> Peer:
    import safetensors.numpy as st

    def save(path: str, state: State) -> None:
        Path(path).mkdir()
        st.save_file(state, f"{path}/model.safetensors")

    return Peer(save, lambda path, _spec: st.load_file(f"{path}/model.safetensors"))


def _safetensors_jax(_memory_budget: str) -> Peer:
    import safetensors.flax as st

    def save(path: str, state: State) -> None:
        Path(path).mkdir()
        st.save_file(state, f"{path}/model.safetensors")

    return Peer(save, lambda path, _spec: st.load_file(f"{path}/model.safetensors"), on_device)


def _tofile(_memory_budget: str) -> Peer:
    """numpy's own bytes, one file per leaf."""

    def save(path: str, state: State) -> None:
        Path(path).mkdir()
        for name, leaf in state.items():
            leaf.view(np.uint8).tofile(f"{path}/{name.replace('/', '.')}")

    def load(path: str, spec: Spec) -> State:
        loaded: State = {}
        for name, (shape, dtype) in spec.items():
            data = np.fromfile(f"{path}/{name.replace('/', '.')}", np.uint8)
            loaded[name] = data.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)
        return loaded

    return Peer(save, load)


def _tensorstore(_memory_budget: str) -> Peer:
    engine = tensorstore_peer.Engine()
    return Peer(engine.save, engine.load)


def on_device(leaf: Array) -> Any:
    """A jax.Array on the only CPU device, which shares host memory."""
    import jax

    return jax.device_put(leaf, _sharding()).block_until_ready()


def abstract(spec: Spec) -> dict[str, Any]:
    """The tree of ShapeDtypeStruct that says where each leaf goes."""
    import jax

    where = _sharding()
    return nest({name: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for name, (shape, dtype) in spec.items()})


def _sharding() -> Any:
    import jax

    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


PEERS: dict[str, Callable[[str], Peer]] = {
    "raw": lambda _memory_budget: Peer(raw.save, raw.load),
    "tailrace": _tailrace,
    "tailrace-jax": _tailrace_jax,
    "orbax-zstd": partial(_orbax, compression=True),
    "orbax-plain": partial(_orbax, compression=False),
    "orbax-v1-zstd": partial(_orbax_v1, compression=True),
    "orbax-v1-plain": partial(_orbax_v1, compression=False),
    "tensorstore": _tensorstore,
    "safetensors": _safetensors,
    "safetensors-jax": _safetensors_jax,
    "tofile": _tofile,
}
