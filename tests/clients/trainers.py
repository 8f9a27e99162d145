"""The clients that bring their own training loop."""

import contextlib
import json
import os
import tempfile
from pathlib import Path

from models import client
from runs import DEVICES, randoms


@client("keras", "model.train_step = jaxmp.fuse(model.train_step)", ("none", "its own mesh"), why_not="no others")
def keras(run):
    """Runs `fit()`, under ModelParallel if there is a mesh; a step is an epoch of two batches."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    distribution = None
    if run.place != "none":
        devices = keras.distribution.list_devices()[:DEVICES]
        mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
        layout = keras.distribution.LayoutMap(mesh)
        layout["dense.*kernel"] = (None, "model")
        layout["dense.*bias"] = ("model",)
        distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)
    inputs = keras.Input((16, 32))
    x = keras.layers.LayerNormalization()(inputs)
    x = inputs + keras.layers.MultiHeadAttention(4, 8)(x, x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(64, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(32)(keras.layers.Dropout(0.1)(x)))
    model.compile(optimizer="sgd", loss="mse")
    model.train_step = run.fuse(model.train_step)
    x, y = randoms(16, 16, 32), randoms(16, 16, 32, seed=1)
    while True:
        keras.distribution.set_distribution(distribution)
        history = model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
        yield history.history["loss"], [w.numpy() for w in model.weights if "seed" not in w.path]


@client(
    "netket",
    "srt._compute_srt_update = jaxmp.fuse(srt._compute_srt_update)  # netket._src.ngd; MCState(apply_fun=...) likewise",
    ("none", "its own mesh"),
    bound=1e-6,
    why_not="no others",
)
def netket(run):
    """Runs stochastic reconfiguration of a small chain in float64; on a mesh, samples are over four devices."""
    import jax
    import netket as nk
    import optax
    from netket._src.ngd import srt

    update = srt._compute_srt_update
    mesh = jax.make_mesh((DEVICES if run.place != "none" else 1,), ("S",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        hilbert, model = nk.hilbert.Spin(0.5, 8), nk.models.RBM(alpha=2)
        hamiltonian = nk.operator.IsingJax(hilbert, nk.graph.Chain(8), h=1.0)
        sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
        options = {"use_ntk": True, "on_the_fly": False}
        functions = {"init_fun": model.init, "apply_fun": run.fuse(model.apply)}
        state = nk.vqs.MCState(sampler, **functions, n_samples=64, seed=0, sampler_seed=1)
        driver = nk.driver.VMC_SR(hamiltonian, optax.sgd(0.02), variational_state=state, diag_shift=0.01, **options)
    while True:
        with jax.set_mesh(mesh):
            srt._compute_srt_update = run.fuse(update)
            driver.run(1, show_progress=False, out=nk.logging.RuntimeLog())
            srt._compute_srt_update = update
            yield state.parameters


def maxtext(run, *options):
    """Runs MaxText's own main program; reads each step from its file of metrics."""
    import maxtext
    from maxtext.trainers.pre_train import train

    plain = train.train_step
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    general = (
        *("run_name=client", "hardware=cpu", "skip_jax_distributed_system=true", "dataset_type=synthetic"),
        *("enable_checkpointing=false", "enable_goodput_recording=false", "monitor_goodput=false"),
        *("enable_tensorboard=false", "log_config=false", "attention=dot_product", "dtype=float32"),
        *(
            "steps=3",
            "per_device_batch_size=1",
            "max_target_length=16",
            "learning_rate=0.01",
            "warmup_steps_fraction=0",
        ),
        f"shard_mode={'explicit' if 'explicit' in run.place else 'auto'}",
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        metrics = Path(folder) / "metrics"
        train.train_step = run.fuse(plain)
        try:
            train.main(
                ["", str(base), f"base_output_directory={folder}", f"metrics_file={metrics}", *general, *options]
            )
        finally:
            train.train_step = plain
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        yield {key: value for key, value in line.items() if "loss" in key or "norm" in key}


MAXTEXT_LINE = "train.train_step = jaxmp.fuse(train.train_step)  # maxtext.trainers.pre_train"
MAXTEXT_PLACES = ("its own mesh", "its own explicit mesh")


TINY = {"base_emb_dim": 16, "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": 8, "vocab_size": 64}
TINY |= {"base_mlp_dim": 32, "base_moe_mlp_dim": 32, "base_num_decoder_layers": 2}


@client("maxtext", MAXTEXT_LINE, MAXTEXT_PLACES, why_not="its program has a mesh; needs Python 3.12")
def maxtext_dense(run):
    """Runs MaxText's smallest configuration, or a small Llama on explicit axes, which the smallest one refuses."""
    llama = ["decoder_block=llama2", *(f"{key}={value}" for key, value in TINY.items())]
    smallest = ["model_name=gpt3-52k", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]
    return maxtext(run, *(llama if "explicit" in run.place else smallest))


@client("maxtext", MAXTEXT_LINE, MAXTEXT_PLACES[:1], why_not="its experts refuse explicit axes; needs Python 3.12")
def maxtext_moe(run):
    options = [f"{key}={value}" for key, value in (TINY | {"num_experts": 4, "num_experts_per_tok": 2}).items()]
    return maxtext(run, "decoder_block=mixtral", "megablox=false", "sparse_matmul=false", *options)
