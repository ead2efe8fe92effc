"""Save and load a Flax TrainState with its optax state: `like` gives it back as what it was."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import tailrace

model, optimizer = nn.Dense(16), optax.adamw(1e-2)
x, y = jnp.ones((4, 8)), jnp.zeros((4, 16))


def create(key: jax.Array) -> TrainState:
    params = model.init(key, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@jax.jit
def train(state: TrainState) -> TrainState:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


state = create(jax.random.key(0))
for _ in range(3):
    state = train(state)
tailrace.save("ckpt", state)

# In another process, on other devices: shapes alone say what to load, nothing is initialised for it.
like = jax.eval_shape(create, jax.random.key(0))
loaded = tailrace.load("ckpt", like=like)

assert type(loaded) is TrainState
assert int(loaded.step) == 3
assert jax.tree.all(jax.tree.map(jnp.array_equal, train(state), train(loaded)))
print("training goes on as if it had not stopped")
