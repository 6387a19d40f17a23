"""Logs to MLflow: to its tracking server, or else to files in the run folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from trigon.report.delivery import LoggedRun, Sample, SampleSplit
from trigon.report.run import flatten
from trigon.report.samples import COLUMNS, cells, image_strip

STORE = "mlflow"
"""Folder of a run's store within the run folder, without a tracking server."""


class MLflowLogger:
    """Samples are a table with the images in it, an artifact for each step."""

    name = "mlflow"
    remedy = "Set MLFLOW_TRACKING_URI to a tracking server, or leave it out for a store in the run folder"

    def __init__(self) -> None:
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._suffix = ""  # of the names of tables

    def open(self, run: LoggedRun) -> str:
        """See delivery.py."""
        import mlflow

        self._mlflow = mlflow
        uri, place = mlflow.get_tracking_uri(), ""
        if not mlflow.is_tracking_uri_set() and uri.startswith("sqlite:"):
            # MLflow's default needs a database library, which mlflow-skinny has not. Its store of
            # files needs consent.
            mlflow.environment_variables.MLFLOW_ALLOW_FILE_STORE.set(True)
            store = (run.folder / STORE).resolve()
            uri = store.as_uri()
            place = f"; all of mlflow shows it: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {store}"
        server = hashlib.sha256(uri.encode()).hexdigest()  # the address may hold a password
        # A client, since mlflow.log_metrics would belong to the run of the calling thread.
        client = self._client = mlflow.MlflowClient(tracking_uri=uri)
        # The id in the run folder lets a resumed run continue its curves.
        saved = run.read_record(self.name)
        if saved.get("server_sha256") == server:
            self._run_id = saved["run_id"]
            # log_table would append the samples of a repeated step to the earlier samples.
            self._suffix = time.strftime("_resumed_%Y%m%d_%H%M%S")
            client.update_run(self._run_id, status="RUNNING")  # its parameters cannot be changed
        else:
            experiment = client.get_experiment_by_name(run.project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
            created = client.create_run(experiment_id, run_name=run.experiment)
            self._run_id = created.info.run_id
            parameters = [mlflow.entities.Param(key, str(value)[:500]) for key, value in flatten(run.config).items()]
            for start in range(0, len(parameters), 100):  # a server takes 100 at a time
                client.log_batch(self._run_id, params=parameters[start : start + 100])
        run.write_record(self.name, {"run_id": self._run_id, "server_sha256": server})
        return f"run {self._run_id}{place}"

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Logger."""
        timestamp = self._mlflow.utils.time.get_current_time_millis()
        entries = [self._mlflow.entities.Metric(key, value, timestamp, step) for key, value in metrics.items()]
        for start in range(0, len(entries), 1000):
            self._client.log_batch(self._run_id, metrics=entries[start : start + 1000])

    def log_samples(self, step: int, split: SampleSplit, samples: Sequence[Sample]) -> None:
        """See Logger."""
        rows = [cells(sample) for sample in samples]
        table: dict[str, list[Any]] = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
        strips = [image_strip(sample.images) for sample in samples]
        if any(strips):
            # A column of images takes nothing else.
            images = [self._mlflow.Image(strip or Image.new("RGB", (1, 1), "white")) for strip in strips]
            table = {"images": images, **table}
        self._client.log_table(self._run_id, table, f"samples/{split}_{step:06d}{self._suffix}.json")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


LOGGER = MLflowLogger
