"""What `lmwright launch` on slices looks at before it makes anything, and what it leaves where it
cannot go on."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from lmwright.cli.main import main
from lmwright.cloud import checks, remote, roles
from lmwright.cloud.book import begin, id_of, label_of
from lmwright.cloud.slices import Slices
from lmwright.cloud.spec import Cloud, Spec, job_names, load_spec, save_spec
from lmwright.cloud.target import (
    cloud_of,
    offers_of,
    refuse_local_places,
    settings_path,
    settings_with,
)
from lmwright.cloud.tpu_api import NO_CREDENTIALS, Tpus
from lmwright.data.stale import refuse_stale
from lmwright.errors import UserError
from lmwright.storage.bucket import Bucket
from tests.cloud import fake_tpu
from tests.cloud.fake_tpu import MEMBER
from tests.cloud.played import QUICK, offer

ZONE = "us-central2-b"
ON_BUCKET = ("roles/storage.objectAdmin", "roles/storage.legacyBucketReader")


def launched(tmp_path, *words):
    options = ["--on", "v4-16", "--zone", ZONE, "--project", "p", "--name", "j", *words]
    return main(["launch", str(tmp_path / "run.toml"), *options])


def test_a_dry_run_shows_every_request_and_makes_none(run, tpu, tmp_path, capsys):
    assert launched(tmp_path, "--spot", "--dry-run") == 0
    out = capsys.readouterr().out
    assert f"POST projects/p/locations/{ZONE}/queuedResources" in out
    assert '"acceleratorType": "v4-16"' in out.replace('":"', '": "')
    assert "FITS" in out  # the plan
    assert "not checked, since no service was asked: the bucket's permissions" in out
    assert tpu.calls == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--zone", "us-east5-a", "--on", "v4-32"], "us-east5-a has no v4-32; it has: v4-16"),
        (["--zone", "nowhere"], "'nowhere' is not a zone"),
        (["--on", "7x-16"], "on Kubernetes only"),
        (["--on", "v4-17"], "v4 has no slice of 17"),
        (["--name", "J_1"], "cannot name a slice"),
        (["dir=here"], "dir: here: the hosts of a slice cannot see it"),
        (["--max-cost", "0"], "'--max-cost': 0.0 is not in the range x>0"),
        (["--max-hours", "-1"], "'--max-hours': -1.0 is not in the range x>0"),
        (["--max-cost", "nan"], "--max-cost: must be a number above 0"),
        (
            ["--on", "v4-8", "--do", "prepare", "data.sources.0.path=kaggle://me/set"],
            "0.path: kaggle://me/set: the host of a slice has neither Kaggle's client",
        ),
    ],
)
def test_what_cannot_be_launched(run, tpu, tmp_path, capsys, words, told):
    assert launched(tmp_path, *words) == 2
    assert told in capsys.readouterr().err
    assert not any(call[0] == "POST" for call in tpu.calls)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pack/manifest.json", "data.dir: gs://{place}/pack: there is no manifest.json; make the"),
        ("pack/train/", "gs://{place}/pack/train/{shard} is missing; run `lmwright prepare "),
        ("cut", "gs://{place}/pack/train/{shard} has 3 bytes instead of"),
        (
            "data.pack.seq_len=8",
            "data.dir: gs://{place}: rows hold {seq_len} tokens, and the run needs 8",
        ),
        ("train.global_batch_size=4096", "train.global_batch_size = 4096, but gs://{place}/pack"),
    ],
    ids=("pack", "shards", "cut", "length", "rows"),
)
def test_data_that_cannot_be_trained_on(run, tpu, url, tmp_path, capsys, change, told):
    bucket = Bucket(f"{url}/data")
    (shard,) = [name for name in bucket.entries() if name.startswith("pack/train/")]
    words = []
    if "=" in change:
        words.append(change)
    elif change == "cut":
        bucket.remove(shard)
        bucket.write(shard, b"cut")
    else:
        for name in [name for name in bucket.entries() if name.startswith(change)]:
            bucket.remove(name)
    assert launched(tmp_path, *words) == 2
    error = capsys.readouterr().err
    place = f"{url}/data".removeprefix("gs://")
    assert told.format(place=place, shard=shard.removeprefix("pack/train/"), seq_len=32) in error
    assert f"`lmwright data push FOLDER {url}/data` copies it there" in error
    assert not any(call[0] == "POST" for call in tpu.calls) and not job_names()


def test_data_in_a_bucket_that_was_prepared_with_other_settings(run, tpu, url, tmp_path, capsys):
    """As `launch` does, `train` says it on the hosts' own bucket, too; a run that has begun has the
    settings of its run.toml."""
    words = "data.holdout_fraction=0.3"
    told = (
        f"data.dir: {url}/data was prepared with other settings: data.holdout_fraction is "
        f"{run.data.holdout_fraction} there and 0.3 here"
    )
    assert launched(tmp_path, words) == 2
    assert told in capsys.readouterr().err
    assert not any(call[0] == "POST" for call in tpu.calls) and not job_names()
    assert main(["train", str(tmp_path / "run.toml"), words]) == 2
    assert told in capsys.readouterr().err
    Bucket(run.dir).write("run.toml", "")  # of a start that failed
    with pytest.raises(UserError, match="was prepared with other settings"):
        refuse_stale(replace(run, data=replace(run.data, holdout_fraction=0.3)))
    Bucket(run.dir).write("metrics.jsonl", '{"step": 1}')
    refuse_stale(replace(run, data=replace(run.data, holdout_fraction=0.3)))


def test_a_bucket_that_refuses_writes(run, tpu, proxy, tmp_path, capsys):
    proxy.denied = {"storage.objects.create"}
    try:
        assert launched(tmp_path) == 2
    finally:
        proxy.denied = set()
    assert "may not storage.objects.create; give it the roles" in capsys.readouterr().err
    assert not any(call[0] == "POST" for call in tpu.calls)


def test_settings(run, tpu, tmp_path, capsys):
    path = tmp_path / "config" / "lmwright" / "cloud.toml"
    path.parent.mkdir(parents=True)
    path.write_text('project = "mine"\nzone = "us-central2-b"\n')
    words = ["launch", str(tmp_path / "run.toml"), "--on", "v4-16", "--dry-run"]
    assert main(words) == 0
    assert "projects/mine/locations/us-central2-b" in capsys.readouterr().out
    path.write_text('projekt = "mine"\n')
    assert main(words) == 2
    assert "projekt: no such setting" in capsys.readouterr().err
    path.unlink()
    assert main(words) == 2
    assert "--zone: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words", "asked", "price"),
    [
        ("", ["--spot"], "spot", 0.93),
        ("", ["--reservation", "r"], "reservationName", 4.20),
        ('reservation = "r"', [], "reservationName", 4.20),
        ('reservation = "r"', ["--spot"], "spot", 0.93),
        ('capacity = "spot"', ["--reservation", "r"], "reservationName", 4.20),
        ('capacity = "spot"', ["--guaranteed"], "guaranteed", 4.20),
    ],
)
def test_the_capacity_of_an_option_goes_before_the_files(tpu, file, words, asked, price):
    path = settings_path()
    path.parent.mkdir(parents=True)
    path.write_text(f'project = "p"\nzone = "us-east5-a"\n{file}\n')
    given = {"capacity": words[0][2:]} if len(words) == 1 else {}
    given |= {"reservation": words[1]} if words[1:] else {}
    settings = settings_with(**given)
    [where] = offers_of("v5p-16", settings)
    Tpus(cloud_of(settings)).create("x", "j", where, {})
    kinds = {"spot", "reservationName", "guaranteed"} & set(tpu.bodies[0])
    assert kinds == {asked}
    assert where.price == price  # for the limits of the job


def test_a_bucket_without_gs_is_refused_before_anything_is_sent(tpu):
    with pytest.raises(UserError, match="--bucket: 'b/x' is not a bucket; write gs://BUCKET/FOLD"):
        settings_with(bucket="b/x")


def test_what_is_no_machine_is_told_before_the_zone_is_asked_for(tpu):
    for place in ("local", "gpu:h100x8", "cpu:8"):
        with pytest.raises(UserError, match=f"--on {place}: unknown machine; .* local:2x1,"):
            offers_of(place, settings_with())


def test_two_kinds_of_capacity_are_refused(tpu):
    with pytest.raises(UserError, match="--reservation: conflicts with --spot; give only one"):
        settings_with(capacity="spot", reservation="r")


def test_what_launch_says_without_credentials(run, tpu, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(NO_CREDENTIALS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert launched(tmp_path) == 2
    assert "run: gcloud auth application-default login" in capsys.readouterr().err


def test_what_launch_says_of_a_wrong_project(run, tpu, tmp_path, capsys):
    tpu.allowed = False
    assert launched(tmp_path) == 2
    said = capsys.readouterr().err
    assert "project p refuses it" in said and "roles/tpu.admin" in said
    assert job_names() == []


def test_what_launch_says_of_an_unknown_runtime(run, tpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fake_tpu, "RUNTIMES", ["v2-alpha-tpuv5-lite"])
    assert launched(tmp_path) == 2
    assert "has no runtime version tpu-ubuntu2204-base" in capsys.readouterr().err


def test_what_launch_says_of_a_run_that_does_not_fit(run, tpu, tmp_path, capsys):
    assert launched(tmp_path, "model.mlp_dim=80000000") == 2
    assert "--on: the run does not fit v4-16" in capsys.readouterr().err
    assert tpu.calls == []


def test_of_several_slices_the_one_that_the_run_does_not_suit_is_named(run, tpu, tmp_path, capsys):
    assert launched(tmp_path, "--on", "v4-8,v4-64", "train.global_batch_size=16") == 2
    assert "--on v4-64: train.global_batch_size: 16 rows" in capsys.readouterr().err


def test_what_another_region_costs_is_told(spec, tpu, monkeypatch):
    monkeypatch.setattr(Bucket, "region", lambda _: "EUROPE-WEST4")
    notes = " ".join(checks.check(spec))
    assert "the bucket is in europe-west4 and v4-16 in us-central2-b" in notes
    assert "0.02 USD for each GB" in notes
    monkeypatch.setattr(Bucket, "region", lambda _: "US")
    assert "crosses" not in " ".join(checks.check(spec))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_roles_of_the_hosts_on_the_bucket_are_looked_at(spec, tpu, proxy, count):
    given = [{"role": role, "members": [MEMBER]} for role in ON_BUCKET[:count]]
    proxy.policy = {"bindings": given}
    try:
        notes = roles.warn_of_roles(spec.cloud, spec.url)
    finally:
        proxy.policy = None
    assert len(notes) == 2 - count
    for note, role in zip(notes, ON_BUCKET[count:], strict=True):
        assert f"is not seen to have {role} on the bucket" in note
        assert f"buckets add-iam-policy-binding gs://bkt --member={MEMBER} --role={role}" in note


def test_roles_that_may_not_be_looked_at_are_unknown(spec, tpu):
    [note] = roles.warn_of_roles(spec.cloud, spec.url)
    assert "it is not known whether 12-compute@developer.gserviceaccount.com may save" in note


def test_looking_up_the_bucket_is_needed(run, tpu, proxy, tmp_path, capsys):
    proxy.denied = {"storage.buckets.get"}
    try:
        assert launched(tmp_path) == 2
    finally:
        proxy.denied = set()
    said = capsys.readouterr().err
    assert "may not storage.buckets.get" in said and "roles/storage.legacyBucketReader" in said


def job(url, name):
    """A job of lmwright with a slice that was asked for."""
    spec = Spec(
        name=name, dir="", command=("true",), hosts=2, port=0, url=f"{url}/jobs/{name}",
        cloud=Cloud(project="p"), offers=(offer(),),
    )  # fmt: skip
    begin(spec, "", "")
    book = {"made": [{"id": id_of(spec, 1), "offer": 0, "asked": 0.0}], "current": 0, "offer": 0}
    Bucket(spec.url).write("slices.json", json.dumps(book))
    Tpus(spec.cloud).create(id_of(spec, 1), label_of(spec), offer(), {"lmwright-job": spec.url})
    return spec, Bucket(spec.url)


def test_slices_that_nobody_looks_after_are_named(spec, tpu, url):
    runs, done, forgotten, unknown = (job(url, name) for name in ("runs", "done", "gone", "lost"))
    done[1].write("state.json", json.dumps({"status": "done"}))
    for name in forgotten[1].entries():
        forgotten[1].remove(name)
    unknown[1].write("slices.json", json.dumps({"made": [], "current": None}))
    notes = [note for note in checks.check(spec) if "left over" in note]
    assert len(notes) == 3
    for (left, _), why, note in zip(
        (done, forgotten, unknown), ("is done", "was forgotten", "does not know it"), notes,
        strict=True,
    ):  # fmt: skip
        assert f"its job {left.url} {why}" in note
        assert f"delete {id_of(left, 1)} --force --zone={ZONE} --project=p" in note
    assert not any(id_of(runs[0], 1) in note for note in notes)


def test_a_taken_name_leaves_nothing_in_the_bucket(run, tpu, spec, tmp_path, monkeypatch, capsys):
    save_spec(replace(spec, url="gs://elsewhere/jobs/j"))
    monkeypatch.setattr(remote, "stage", lambda root: 1 / 0)
    assert launched(tmp_path, "--bucket", f"{run.dir}-jobs") == 2
    assert "there is a job 'j' already" in capsys.readouterr().err
    assert Bucket(f"{run.dir}-jobs").entries() == {}
    assert load_spec("j").url == "gs://elsewhere/jobs/j"


@pytest.mark.parametrize("error", [UserError("no Python"), KeyboardInterrupt()])
def test_a_launch_that_ends_early_leaves_no_job(run, tpu, tmp_path, monkeypatch, error):
    def stage(_root):
        raise error

    monkeypatch.setattr(remote, "stage", stage)
    assert launched(tmp_path, "--bucket", f"{run.dir}-jobs") in (2, 130)
    assert job_names() == [] and Bucket(f"{run.dir}-jobs").entries() == {}


def test_of_two_launches_of_a_name_at_once_one_is_refused(spec, tpu, monkeypatch):
    spec, entry, began = replace(spec, url=f"{spec.url}-new"), Bucket.entry, []
    bucket = Bucket(spec.url)

    def meanwhile(self, name):
        found = entry(self, name)
        if name == "job.json" and not began:
            began.append(True)
            begin(replace(spec, token="theirs"), "c", "theirs")
        return found

    monkeypatch.setattr(Bucket, "entry", meanwhile)
    with pytest.raises(UserError, match="there is a job"):
        begin(spec, "c", "ours")
    assert bucket.read("run.toml")[0] == b"theirs"
    assert b"theirs" in bucket.read("job.json")[0]


def test_a_launch_that_was_killed_before_its_job_was_written(spec, tpu, capsys):
    lost = replace(spec, name="lost", url=f"{spec.url}-lost")
    save_spec(lost)
    assert main(["jobs", "follow", "lost"]) == 2
    assert "its launch was interrupted before the job was written" in capsys.readouterr().err
    assert main(["jobs", "forget", "lost"]) == 0
    assert job_names() == [] and not any(call[0] == "POST" for call in tpu.calls)


def test_a_run_that_a_job_trains_already_gets_no_second_slice(
    run, tpu, url, tmp_path, monkeypatch, capsys
):
    """As where its launch was killed, and the same command is run again."""
    there = "--bucket", f"{url}/lmwright"
    monkeypatch.setattr(remote, "stage", lambda root: f"{root}/c")
    monkeypatch.setattr(remote, "start", lambda spec, **_: 0)
    assert launched(tmp_path, *there) == 0
    first = load_spec("j")
    capsys.readouterr()
    assert launched(tmp_path, *there, "--name", "k") == 2
    err = capsys.readouterr().err
    assert f"dir: {run.dir} is trained by job j already, which is starting; follow it" in err
    assert job_names() == ["j"]
    assert launched(tmp_path, *there, "--name", "k", f"dir={url}/other") == 0
    Bucket(first.url).write("state.json", json.dumps({"status": "failed"}))
    assert launched(tmp_path, *there, "--name", "l") == 0
    Bucket(load_spec("l").url).remove("job.json")  # forgotten from another machine
    assert launched(tmp_path, *there, "--name", "m") == 0


def test_launch_ends_at_once_without_quota(run, tpu, tmp_path, monkeypatch, capsys):
    tpu.quota = dict.fromkeys(tpu.quota, False)
    monkeypatch.setattr(remote, "stage", lambda root: f"{root}/c")
    monkeypatch.setattr(remote, "Slices", lambda spec, tell, _: Slices(spec, tell, QUICK))
    assert launched(tmp_path) == 2
    assert sum(call[0] == "POST" for call in tpu.calls) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Quota limit 'TPUV4CoresPerProject' is 0" in err
    assert "lmwright jobs start j" in err


def test_weights_of_kaggle_go_to_a_bucket_first(run):
    run = replace(run, train=replace(run.train, init_from="kaggle://me/set/base"))
    with pytest.raises(UserError, match=r"lmwright import kaggle://me/set/base gs://BUCKET/FOL"):
        refuse_local_places(run)
