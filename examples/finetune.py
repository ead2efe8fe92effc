"""Train LoRA matrices on a frozen base, and save both as one checkpoint that shares the base's data."""

from pathlib import Path

import jax
import jax.numpy as jnp

import tailrace

keys = jax.random.split(jax.random.key(0), 4)
tailrace.save(
    "base",
    {"params": {"kernel": jax.random.normal(keys[0], (256, 256)), "bias": jnp.zeros(256), "scale": jnp.ones(256)}},
)

# The base comes from the checkpoint; what it does not have keeps the value it has here.
fresh = {
    "params": jax.eval_shape(lambda: {"kernel": jnp.zeros((256, 256)), "bias": jnp.zeros(256), "scale": jnp.ones(256)}),
    "lora": {"a": jax.random.normal(keys[1], (256, 8)) / 16, "b": jnp.zeros((8, 256))},
}
state = tailrace.load("base", like=fresh, missing="keep")


def loss(lora: dict[str, jax.Array], params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = x @ (params["kernel"] + lora["a"] @ lora["b"]) + params["bias"]
    return jnp.mean((hidden * params["scale"] - y) ** 2)


x, y = jax.random.normal(keys[2], (32, 256)), jax.random.normal(keys[3], (32, 256))
before = loss(state["lora"], state["params"], x, y)
for _ in range(10):
    gradient = jax.grad(loss)(state["lora"], state["params"], x, y)
    state["lora"] = jax.tree.map(lambda value, slope: value - 0.1 * slope, state["lora"], gradient)
assert loss(state["lora"], state["params"], x, y) < before

with tailrace.fork("base", "tuned") as writer:  # begins with all that base holds; its data files are linked
    writer.write_tree({"lora": state["lora"]})

tuned = tailrace.load("tuned", like=state)
assert jnp.array_equal(tuned["lora"]["b"], state["lora"]["b"])
assert jnp.array_equal(tuned["params"]["kernel"], state["params"]["kernel"])

of_base, of_tuned = ({file.stat().st_ino for file in Path(name, "d").iterdir()} for name in ("base", "tuned"))
assert of_base & of_tuned
with tailrace.open("tuned") as checkpoint:
    print(f"tuned: {len(checkpoint)} leaves, its base shares its data with the first checkpoint")
