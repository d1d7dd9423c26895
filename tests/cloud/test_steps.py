"""A step that was compiled here runs from the cache of a host."""

import jax
import jax.numpy as jnp

from lmwright.cloud.steps import receive_steps, send_steps
from lmwright.program import executable
from lmwright.storage.bucket import Bucket


def test_compiled_steps_reach_the_hosts(url, small_run, tmp_path, monkeypatch):
    lowered = jax.jit(lambda x: 3 * x + 1).lower(jnp.zeros(4))
    devices = jax.devices()[:1]
    for name, key in ((small_run.name, "a1"), ("another", "b2")):
        made = executable.made_of(lowered.as_text(), devices, {}, small_run)
        object.__setattr__(made, "run", name)
        assert executable.save(key, lowered.compile(), made)
    bucket = Bucket(f"{url}/job")
    send_steps(small_run.name, bucket)
    assert set(bucket.entries()) == {"steps/a1", "steps/a1.json"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "host"))
    receive_steps(bucket)
    step = executable.load("a1", lowered, devices)
    assert step(jnp.arange(4.0)).tolist() == [1, 4, 7, 10]
    assert [made.run for made in executable.notes()] == [small_run.name]


def test_a_job_without_steps(url, tmp_path):
    bucket = Bucket(f"{url}/job")
    send_steps("run", bucket)
    assert bucket.entries() == {}
    receive_steps(bucket)
    assert not (tmp_path / "cache" / "lmwright" / "steps").exists()
