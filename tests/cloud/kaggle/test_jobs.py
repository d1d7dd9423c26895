"""Jobs at Kaggle, by its real client against a stand-in on loopback."""

import errno
import io
import os
import tarfile
from dataclasses import replace
from datetime import datetime

import pytest

from lmwright.cli.main import main
from lmwright.cloud.jobs import follow
from lmwright.cloud.kaggle import job, launch, parcel, service
from lmwright.cloud.spec import job_names, jobs_folder, read_state
from lmwright.config.load import dump_toml
from lmwright.errors import UserError
from lmwright.program.lora_section import Adapter, LowRank
from tests.cloud.kaggle.service import TOKEN, end, launched, play_to_the_end

PLAN = launch.plan
pytestmark = pytest.mark.usefixtures("small_wheel")


def test_a_run_goes_through_three_sessions(fake, run, tmp_path):
    codes = {1: (43, 1), 2: (42, 3), 3: (0, 4)}
    fake.play = lambda fake, session: end(session, *codes[session.settings["session"]])
    spec = launched(replace(run, dir=str(tmp_path / "out")))
    assert follow(spec) == 0
    state = read_state(spec)
    assert (state["status"], state["step"], state["attempt"]) == ("done", 4, 3)
    assert (tmp_path / "out" / "checkpoints" / "4").is_dir()
    a, b = (fake.sessions[f"acme/lmwright-cats-{x}"] for x in "ab")
    first, second, third = a[0], b[0], a[1]
    assert not first.request.get("kernelDataSources")
    assert second.request["kernelDataSources"] == ["acme/lmwright-cats-a"]
    assert third.request["kernelDataSources"] == ["acme/lmwright-cats-b"]
    assert third.settings["archives"]["run-cats-2.lmw"] == "run"
    assert "session 3 is over" in (spec.folder / "logs" / "host-0.log").read_text()


def test_a_run_is_planned_first(fake, run, monkeypatch, capsys):
    monkeypatch.setattr(launch, "plan", PLAN)
    launched(run)
    assert "v5e-8" in capsys.readouterr().out
    huge = replace(run.model, embed_dim=16384, mlp_dim=65536, num_layers=80)
    with pytest.raises(UserError, match="does not fit its TPU"):
        launched(replace(run, model=huge), name="huge")


def test_a_session_is_no_longer_than_kaggle_lets_it_be(fake, run, monkeypatch):
    """What is over is ended there, and its output lost."""
    monkeypatch.setattr(launch, "plan", PLAN)
    for hours, fits in ((12.0, False), (9.0, True)):
        longer = replace(run, limits=replace(run.limits, session_hours=hours))
        if fits:
            launched(longer)
            continue
        with pytest.raises(UserError, match=r"limits.session_hours: 12: .* after 9 hours"):
            launched(longer)
        assert not fake.sessions and not fake.datasets


def test_data_of_other_settings_is_not_sent(fake, run):
    other = replace(run.data, tokenize=replace(run.data.tokenize, prepend="none"))
    with pytest.raises(UserError, match=r'data.tokenize.prepend is "bos" there and "none" here'):
        launched(replace(run, data=other))
    assert not fake.sessions and not fake.datasets


def test_what_is_pushed(fake, run):
    launched(run)
    request = fake.sessions["acme/lmwright-cats-a"][0].request
    assert request["machineShape"] == "TpuV5E8"
    assert request["isPrivate"] and request["enableInternet"]
    assert request["kernelType"] == "script" and not request.get("dockerImage")
    assert request["sessionTimeoutSeconds"] == 9 * 3600
    assert len(request["datasetDataSources"]) == 3 and all(fake.private.values())
    kinds = {slug.split("-")[1] for slug in fake.datasets}
    assert kinds == {"wheels", "code", "data"}
    (files,) = (f for slug, f in fake.datasets.items() if "-data-" in slug)
    names = tarfile.open(fileobj=io.BytesIO(*files.values())).getnames()
    assert "shuffle/manifest.json" in names and not any("normalize" in name for name in names)


def test_a_second_launch_sends_nothing_again(fake, run):
    launched(run)
    sent = list(fake.asked).count("CreateDataset")
    fake.sessions["acme/lmwright-cats-a"][0].state = "COMPLETE"
    launched(run, name="dogs")
    assert fake.asked.count("CreateDataset") == sent == 3


def test_a_run_that_has_begun_here_goes_on_there(fake, run, tmp_path):
    (tmp_path / "begun" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "begun" / "checkpoints" / "2" / "weights").write_bytes(b"w")
    spec = launched(replace(run, dir=str(tmp_path / "begun")))
    told = fake.sessions["acme/lmwright-cats-a"][0].settings
    assert "run" in told["archives"].values()
    assert follow(spec) == 0
    assert (tmp_path / "begun" / "checkpoints" / "4").is_dir()
    assert (tmp_path / "begun.before-cats" / "checkpoints" / "2").is_dir()


def test_a_run_that_was_trained_further_here_stays(fake, run, tmp_path):
    spec = launched(replace(run, dir=str(tmp_path / "out")))
    (tmp_path / "out" / "checkpoints" / "9").mkdir(parents=True)
    assert follow(spec) == 0
    assert (tmp_path / "out" / "checkpoints" / "9").is_dir()
    assert (tmp_path / "out.from-cats" / "checkpoints" / "4").is_dir()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk is full"), tarfile.ReadError("cut")])
def test_a_run_that_cannot_be_unpacked_is_fetched_again(fake, run, tmp_path, monkeypatch, error):
    """The disk of the run directory may be another one than that of the jobs."""
    spec = launched(replace(run, dir=str(tmp_path / "out" / "run")))
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "mine").touch()

    def full(self, path, **_):
        (path / "checkpoints").mkdir(parents=True)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractall", full)
        told = (
            rf"cannot be unpacked into .*out/run \((disk is full|cut)\); .* jobs follow {spec.name}"
        )
        with pytest.raises(UserError, match=told):
            follow(spec)
    assert os.listdir(tmp_path / "out") == ["run"] and (tmp_path / "out" / "run" / "mine").exists()
    assert follow(spec) == 0
    assert (tmp_path / "out" / "run" / "checkpoints" / "4").is_dir()
    assert sorted(os.listdir(tmp_path / "out")) == ["run", "run.before-cats"]


def test_a_user_mistake_ends_the_job(fake, run, capsys):
    fake.play = lambda fake, session: end(session, 2, 0, error="lmwright: error: bad")
    spec = launched(run)
    assert follow(spec) == 1
    assert "lmwright: error: bad" in capsys.readouterr().err
    assert len(fake.sessions) == 1


def test_no_tpu_is_told_at_once(fake, run, capsys):
    def play(fake, session):
        session.state = "ERROR"
        session.log = "lmwright: error: this machine has no TPU (cpu); choose TpuV5E8\n"

    fake.play = play
    assert follow(launched(run)) == 1
    assert "has no TPU" in capsys.readouterr().err


def test_the_last_hours_of_a_week_are_used_and_the_next_waited_for(fake, run, monkeypatch):
    fake.quota = 70000.0 - 3600, 70000.0

    def play(fake, session):
        fake.quota = 70000.0, 70000.0
        end(session, 43, 2)

    fake.play = play
    spec = launched(run)
    assert fake.sessions["acme/lmwright-cats-a"][0].request["sessionTimeoutSeconds"] == 3600
    kaggle = service.Kaggle()
    while read_state(spec)["status"] != "waiting":
        job.look(spec, kaggle)
    job.look(spec, kaggle)
    assert len(fake.sessions) == 1
    assert "waiting for more" in (spec.folder / "events.log").read_text()
    fake.quota, fake.play = (0.0, 70000.0), play_to_the_end
    assert follow(spec) == 0


def test_a_spent_quota_is_refused(fake, run):
    fake.quota = 72000.0, 72000.0
    with pytest.raises(UserError, match=r"0.0 of 20.0 h left, renewed 2026-11-28"):
        launched(run)
    assert not fake.sessions and not fake.datasets and not job_names()


def test_an_unknown_quota_is_said(fake, run, capsys):
    fake.quota = None
    launched(run)
    assert "unknown (Kaggle does not say)" in capsys.readouterr().out


def test_no_token(fake, run, monkeypatch):
    monkeypatch.delenv("KAGGLE_API_TOKEN")
    with pytest.raises(UserError, match="no token here; make one at"):
        launched(run)


def test_a_lost_token(fake, run, monkeypatch):
    monkeypatch.setenv("KAGGLE_API_TOKEN", "KGAT_old")
    with pytest.raises(UserError, match="does not accept the token"):
        launched(run)


def test_no_client(fake, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Kaggle's client; run `pip install"):
        launched(run)


def test_a_phone_that_is_not_verified(fake, run):
    fake.refusals["SaveKernel"] = 400, "Phone verification is required"
    with pytest.raises(UserError, match=r"verify your phone number at .*settings"):
        launched(run)
    assert not job_names()


def test_data_that_is_not_prepared(fake, run, tmp_path):
    with pytest.raises(UserError, match=r"data.dir: .* is not here, .* run `lmwright prepare`"):
        launched(replace(run, data=replace(run.data, dir=str(tmp_path / "nowhere"))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data.dir: .* is not prepared"):
        launched(replace(run, data=replace(run.data, dir=str(tmp_path / "empty"))))
    with pytest.raises(UserError, match=r"data.dir: s3://.* cannot be read at Kaggle"):
        launched(replace(run, data=replace(run.data, dir="s3://bucket/data")))


def test_missing_data_is_told_before_the_plan(fake, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "plan", PLAN)
    with pytest.raises(UserError, match=r"data.dir: .* is not here, .* run `lmwright prepare`"):
        launched(replace(run, data=replace(run.data, dir=str(tmp_path / "nowhere"))), dry_run=True)
    assert capsys.readouterr().out == ""


def test_a_run_of_another_job_is_not_sent_again(fake, run, tmp_path, monkeypatch, capsys):
    """Under the next free name it would be another kernel, for which the week's quota is spent."""
    fake.play = lambda fake, session: None
    (tmp_path / "run.toml").write_text(dump_toml(run))
    words = ["launch", str(tmp_path / "run.toml"), "--on", "kaggle", "--detach"]
    assert main(words) == 0
    (name,) = job_names()
    assert main(words) == 2 and job_names() == [name]
    told = capsys.readouterr().err
    assert f"is trained by job {name} already, which is running; follow it: lmwright jobs" in told
    (event, *_) = (jobs_folder() / name / "events.log").read_text().splitlines()
    assert datetime.fromisoformat(" ".join(event.split(" ")[:2])).tzinfo


def test_a_name_that_runs_already(fake, run):
    fake.play = lambda fake, session: None
    spec = launched(run)
    job.look(spec, service.Kaggle())
    spec.folder.rename(spec.folder.with_name("moved"))
    with pytest.raises(UserError, match=r"lmwright-cats-a is running at Kaggle already"):
        launched(run)


def test_buckets_need_a_secret_and_the_internet(fake, run):
    launched(replace(run, dir="gs://bucket/run"))
    told = fake.sessions["acme/lmwright-cats-a"][0].settings
    assert told["secrets"] == ["GOOGLE_APPLICATION_CREDENTIALS"]
    assert told["hosts"] == ["storage.googleapis.com"] and told["dir"] == "gs://bucket/run"


def test_a_dry_run_asks_nobody(fake, run, capsys):
    launched(run, dry_run=True)
    out = capsys.readouterr().out
    assert not fake.asked and not job_names()
    assert '"machine_shape": "TpuV5E8"' in out and "/@lmwright@/run" in out


def test_stop_lets_no_other_session_begin(fake, run, capsys):
    fake.play = lambda fake, session: end(session, 43, 2)
    spec = launched(run)
    job.stop(spec)
    assert "ends by itself by" in capsys.readouterr().out
    assert follow(spec) == 0
    assert read_state(spec)["status"] == "stopped" and len(fake.sessions) == 1


def test_no_secret_is_sent(fake, run, monkeypatch, tmp_path):
    secrets = ["hf_SECRET1", "wandb-SECRET2", "passwordSECRET3"]
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    monkeypatch.setenv("WANDB_API_KEY", secrets[1])
    source = replace(run.data.sources[0], path=f"https://me:{secrets[2]}@example.org/text.jsonl")
    run = replace(run, dir=str(tmp_path / "out"), data=replace(run.data, sources=(source,)))
    spec = launched(run)
    assert follow(spec) == 0
    kept = [path.read_bytes() for path in spec.folder.rglob("*") if path.is_file()]
    assert any(b"example.org" in body for body in fake.bodies)
    for text in [*secrets, TOKEN]:
        assert not any(text.encode() in data for data in [*fake.bodies, *kept])


def test_the_command_line(fake, run, tmp_path, monkeypatch, capsys):
    planned = launch.plan
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run))
    assert main(["launch", str(file), "--on", "kaggle", "--dry-run"]) == 0
    assert main(["launch", str(file)]) == 2
    assert "--on: missing" in capsys.readouterr().err
    assert main(["launch", str(file), "--notebook", str(tmp_path / "cats.ipynb")]) == 0
    assert "attach" in capsys.readouterr().out
    words = ["--notebook", str(tmp_path / "odd.ipynb")]
    assert main(["launch", str(file), *words, "data.holdout_fraction=0.3"]) == 2
    assert "was prepared with other settings" in capsys.readouterr().err
    assert not (tmp_path / "odd.ipynb").exists()
    monkeypatch.setattr(launch, "plan", PLAN)
    assert main(["launch", str(file), *words, "train.global_batch_size=6"]) == 0
    assert "note: on Kaggle's TPU it would not run: train." in capsys.readouterr().out
    monkeypatch.setattr(launch, "plan", planned)
    assert main(["launch", str(file), "--on", "kaggle", "--name", "cats", "--detach"]) == 0
    assert main(["jobs", "stop", "cats"]) == 0
    assert main(["jobs", "follow", "cats"]) == 0
    assert main(["jobs", "show", "cats"]) == 0
    assert "kaggle.com/code/acme/lmwright-cats-a" in capsys.readouterr().out
    assert main(["jobs", "forget", "cats"]) == 0
    assert "lmwright-wheels-" in capsys.readouterr().out


def test_places_of_this_machine_are_sent(run, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    adapters = (
        Adapter(name="a", data=run.data.dir),
        Adapter(name="b", init_from=str(tmp_path / "weights")),
    )
    run = replace(
        run,
        dir=str(tmp_path / "out"),
        lora=LowRank(adapters=adapters, init_from="hf://acme/adapter"),
        train=replace(run.train, init_from=str(tmp_path / "model.gguf")),
    )
    packed = parcel.pack(run, tmp_path)
    folders = {archive.folder: archive for archive in packed.archives if archive.folder}
    text = packed.run
    assert 'init_from = "/@lmwright@/init-3/model.gguf"' in text
    assert 'init_from = "hf://acme/adapter"' in text
    assert sorted(archive.kind for archive in folders.values()) == ["data", "data", "init", "init"]
    for folder, archive in folders.items():
        assert f"/@lmwright@/{folder}" in text and archive.files
    assert packed.hosts == ("huggingface.co",) and not packed.secrets
