"""An engine rejects weights of a kind that it cannot read, when it is given them."""

import pytest
import torch

from support.rollout import NO_WEIGHTS, handle_of
from trigon.distributed.engines import WorkersTrainEngine, WorkerWeights
from trigon.distributed.rollout_engine import LearnerReplicas, WorkersRolloutEngine
from trigon.errors import EngineError
from trigon.rollout.protocol import require_local_weights
from trigon.training.fake import FakeTrainEngine


class NoWorkers:
    """A worker group that no call may reach."""

    workers = ()


def test_an_engine_in_this_process_rejects_the_weights_of_workers():
    weights = WorkersTrainEngine(NoWorkers(), regularized=False).weights()
    assert isinstance(weights, WorkerWeights)
    with pytest.raises(EngineError, match=r"in this process cannot load WorkerWeights\. Give it the weights\(\)"):
        require_local_weights(weights)


def test_an_engine_of_workers_rejects_local_weights():
    engine = WorkersRolloutEngine(LearnerReplicas(NoWorkers(), replica_size=1))
    with (
        pytest.raises(EngineError, match=r"of several workers cannot load LocalWeights\. Give it the weights\(\)"),
        engine.awake(NO_WEIGHTS, version=0),
    ):
        pass


def test_local_weights_can_be_read_again_and_are_current():
    trainer = FakeTrainEngine()
    weights = trainer.weights()
    assert dict(weights.read()) == {"updates": torch.tensor([0.0])}
    trainer.updates = 3
    assert dict(weights.read()) == {"updates": torch.tensor([3.0])}
    assert require_local_weights(weights) is weights


def test_a_handle_gives_each_tensor_once():
    tensors = {"a": torch.zeros(1), "b": torch.ones(2)}
    assert list(handle_of(tensors).read()) == list(tensors.items())
