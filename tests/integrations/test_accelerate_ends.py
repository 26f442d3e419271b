"""Accelerate, beside the fault matrix: scalars, checkpoints, ends, and what is refused."""

import json
import math
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate", reason="not installed: accelerate")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("own_place", "bare")]

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from tests.integrations.accelerate_loop import Own, bare, ends, journal, same  # noqa: E402, F401
from tests.support.watched import own_place  # noqa: E402, F401
from trainer_hooks.integrations import framework  # noqa: E402
from trainer_hooks.integrations.accelerate import attach, refuse_accelerate_loop  # noqa: E402
from trainvitals.errors import MissingDependencyError, UsageError  # noqa: E402
from trainvitals.records import AttemptStarted, ChangeExpected  # noqa: E402

NAN, INF = float("nan"), float("inf")


def test_what_the_loop_logs_is_kept_whether_or_not_there_is_a_tracker(tmp_path):
    own = Own()
    own.attach()
    own.step()
    own.accelerator.log({"accuracy": 0.5, "phase": "warm", "on": True, "t": torch.tensor(2.0)})
    own.accelerator.init_trackers("project")
    own.accelerator.log({"accuracy": 0.75}, step=1)
    own.attached.close()
    expected = [(1, "accuracy", 0.5), (1, "t", 2.0), (1, "accuracy", 0.75)]
    assert expected == journal(tmp_path).scalars()


def test_a_loaded_run_goes_on_with_its_step_and_its_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("VITALS_OUTLIER_WARM_UP", "12")
    own = Own()
    own.attach()
    own.run(20)
    own.accelerator.save_state(str(tmp_path / "saved"))
    expected = own.attached.state_dict()
    own.attached.close()
    again = Own()
    again.attach()
    again.accelerator.load_state(str(tmp_path / "saved"))
    assert 20 == again.attached.step_index
    assert json.loads(json.dumps(expected))["detectors"] == again.attached.state_dict()["detectors"]
    again.step(1e4)  # left to the loop's clip
    kept = again.state()
    again.step(1e4)
    assert same(kept, again.state())
    again.attached.close()
    branches = [e for e in journal(tmp_path).events if isinstance(e, AttemptStarted)]
    assert [0, 0, 20] == sorted(branch.fork_step for branch in branches)


def test_a_folder_that_was_saved_without_us_is_loaded_and_a_late_load_begins_a_new_baseline(
    tmp_path,
):
    own = Own()
    own.run(2).accelerator.save_state(str(tmp_path / "saved"))
    own.attach()
    own.accelerator.load_state(str(tmp_path / "saved"))
    assert 0 == own.attached.step_index
    own.step()
    own.accelerator.load_state(str(tmp_path / "saved"))
    own.step()
    own.attached.close()
    said = [e.reason for e in journal(tmp_path).events if isinstance(e, ChangeExpected)]
    assert ["accelerator.load_state() was called"] == said


def test_the_end_of_the_training_is_the_end_of_the_run(tmp_path):
    own = Own()
    own.attach()
    own.step()
    own.accelerator.end_training()
    assert ["finished"] == ends(tmp_path)


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", ["XLA", "MEGATRON_LM"])
def test_an_update_that_accelerate_does_not_make_is_refused(kind, monkeypatch):
    own = Own()
    monkeypatch.setattr(Accelerator, "distributed_type", getattr(DistributedType, kind))
    with pytest.raises(UsageError, match=f"Accelerate trains with {kind}"):
        own.attach()


def test_an_optimizer_that_was_not_prepared_is_refused():
    own = Own()
    with pytest.raises(UsageError, match=r"that accelerator.prepare\(\) has not returned"):
        attach(own.accelerator, own.model, own.optimizer.optimizer)


def test_several_optimizers_with_a_scaler_and_updates_within_backward_are_refused():
    own = Own(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="2 optimizers with one gradient scaler"):
        attach(own.accelerator, own.model, [own.optimizer, own.optimizer])
    lomo = type("Lomo", (), {})()
    prepared = SimpleNamespace(accelerator_state=None, optimizer=lomo)
    with pytest.raises(UsageError, match="Lomo updates parameters inside backward"):
        refuse_accelerate_loop(DistributedType.NO, [prepared])


def test_without_accelerate_the_extra_is_named(monkeypatch):
    def missing(_name):
        raise PackageNotFoundError

    own = Own()
    monkeypatch.setattr(framework, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"trainvitals\[accelerate\]"):
        own.attach()


def test_the_losses_of_a_step_that_failed_in_backward_are_not_counted(tmp_path):
    own = Own()
    own.attach()
    with pytest.raises(RuntimeError):
        own.accelerator.backward(torch.tensor(math.pi))
    own.step()
    own.attached.close()
    assert {0: pytest.approx(own.losses[-1])} == journal(tmp_path).steps("loss")
