"""The pipeline's section of a domain's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from muster.core import errors
from muster.core.reports import columns
from muster.core.settings import sections
from muster.pipeline.history import storage

doc = sections.field_doc


class PipelineSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Spark at the root of the monitoring hierarchy. Needs `muster-fabric[spark]`."""

    enabled: Annotated[
        bool,
        doc(
            "Start the pipeline with the domain, as a process of its own. It takes a gigabyte or more of "
            "memory and some seconds; `muster run pipeline` starts it by hand."
        ),
    ] = False
    name: Annotated[str, doc("Its identity on the bus.")] = "pipeline"
    master: Annotated[
        str,
        doc(
            "Where Spark runs: `local[*]`, `spark://HOST:PORT`, `yarn`, `k8s://URL`. Away from this machine, "
            "`history_dir` and `checkpoint_dir` must be on storage that all of its machines share."
        ),
    ] = "local[*]"
    memory: Annotated[str, doc("Spark's heap. Messages and the state of shards pass through it.")] = "1g"
    ui_port: Annotated[
        int,
        doc(
            "Port of Spark's pages, with its metrics for Prometheus at `/metrics/prometheus` and "
            "`/metrics/executors/prometheus`. They have no login: with a local master they listen on "
            "loopback. 0: none with a local master, Spark's default port on a cluster.",
            ge=0,
            le=65535,
        ),
    ] = 0
    spark: Annotated[
        tuple[str, ...],
        doc("Further settings of Spark, as NAME=VALUE; they override those of Muster."),
    ] = ()
    trigger_s: Annotated[
        float,
        doc(
            "Time between micro-batches: results are up to this late. Each batch costs half a second of CPU "
            "however little is in it.",
            gt=0,
            le=3600,
        ),
    ] = 10.0
    window_s: Annotated[
        float,
        doc(
            "Length of the windows over which reports are rolled up. A change takes effect when windows of "
            "both lengths end at the same time, or at once if that is more than an hour away.",
            gt=0,
            le=86400,
        ),
    ] = 10.0
    delay_s: Annotated[
        float,
        doc(
            "The watermark: a window closes this long after its end, and what comes later is counted as "
            "late. At least the holding times of all channels on the way up. Micro-batches begin at "
            "multiples of the trigger, where windows end: after a delay a little shorter than that the next "
            "batch closes the window, after one just as long often only the batch after it.",
            ge=0,
            le=86400,
        ),
    ] = 9.0
    lease_s: Annotated[
        float,
        doc(
            "A driver that hangs is replaced by a standby after this time. A driver that is only slow for "
            "longer is replaced, too: it loses nothing, but the takeover takes some seconds.",
            ge=2,
            le=60,
        ),
    ] = 6.0
    skew_s: Annotated[
        float,
        doc("A report whose time is further ahead of the broker's clock than this is refused.", ge=0),
    ] = 60.0
    stale_after: Annotated[
        float, doc("A machine that is silent for more than so many of its periods is stale.", gt=0)
    ] = 3.0
    forget_s: Annotated[
        float, doc("A machine that is silent for so long is no longer one of the fleet.", gt=0)
    ] = 86400.0
    top: Annotated[int, doc("How many machines the ranking of a metric holds.", ge=0, le=1000)] = 10
    top_metrics: Annotated[tuple[str, ...], doc("Which metrics are ranked.")] = (
        "cpu_percent",
        "memory_percent",
    )
    rules: Annotated[sections.FilePath, doc("The file with alert rules and contacts. Empty: none.")] = ""
    steps: Annotated[
        tuple[str, ...],
        doc(
            "Steps of your own, which compute further metrics from reports: files ending with .py, or "
            "installed modules. They run in the pipeline's processes, with its rights."
        ),
    ] = ()
    max_messages: Annotated[
        int,
        doc(
            "Most messages in one micro-batch: bounds memory and the length of batches when the pipeline has "
            "to catch up. A message of a thousand reports is some 150 kB.",
            ge=1,
        ),
    ] = 4000
    splits: Annotated[
        int, doc("Parts of a batch that are read at once. 0: as `partitions` with 0.", ge=0, le=1024)
    ] = 0
    shards: Annotated[
        int,
        doc(
            "Parts of the fleet's state, each with some of the machines: a multiple of `partitions`. More "
            "need less memory at a time, and cost more for each batch. 0: one for each partition. It can be "
            "changed at any start: the state is divided anew.",
            ge=0,
            le=4096,
        ),
    ] = 0
    partitions: Annotated[
        int,
        doc(
            "Spark's shuffle partitions: shards worked on at once. 0: one for each core of Spark; with a "
            "local master a single one until a batch has more than 20,000 reports. It can be changed at any "
            "start.",
            ge=0,
            le=1024,
        ),
    ] = 0
    checkpoint_dir: Annotated[
        sections.FilePath,
        doc(
            "Spark's checkpoint: a path or URL (file, s3, s3a, gs, abfss, hdfs). "
            "Empty: `pipeline/checkpoint` in the domain's folder."
        ),
    ] = ""
    history_dir: Annotated[
        sections.FilePath,
        doc(
            "The history, as Delta Lake tables: a path or URL (file, s3, s3a, gs, abfss). "
            "Empty: `history` in the domain's folder."
        ),
    ] = ""
    compact: Annotated[
        bool,
        doc(
            "Maintain the history: merge small files, compute hourly rows, delete old rows and unused files."
        ),
    ] = True
    as_of_s: Annotated[
        float,
        doc(
            "How far `--as-of` reaches back: replaced or deleted files are removed after this time, "
            "and earlier if the history exceeds its budget.",
            ge=3600,
        ),
    ] = 7 * 86400.0
    operators: Annotated[
        tuple[str, ...],
        doc("Who may acknowledge, silence and stop: identities, or `*` for everyone on the bus."),
    ] = ("admin",)
    webhooks_allowed: Annotated[
        tuple[str, ...], doc("Notices go to webhooks only below these addresses (https://hooks.example/).")
    ] = ()
    mail_allowed: Annotated[
        tuple[str, ...], doc("Notices go by mail only to these addresses, or `@example.org` for all there.")
    ] = ()
    mail_server: Annotated[str, doc("HOST:PORT of the server that takes our mail. Empty: no mail.")] = ""
    mail_from: Annotated[str, doc("The sender of our mail.")] = "muster@localhost"
    mail_security: Annotated[
        Literal["starttls", "tls", "off"], doc("`off` is refused but for a server on loopback.")
    ] = "starttls"
    mail_user: Annotated[str, doc("Name to log in with. Empty: no login.")] = ""
    mail_password: Annotated[sections.Secret, doc("Its password.")] = ""

    def parallelism(self, cores: int) -> tuple[int, int, int]:
        """Shards, partitions and splits for a number of cores."""
        cores = min(1024, max(1, cores))
        partitions = self.partitions or cores
        if self.shards and not self.partitions:  # the largest number that divides the shards
            partitions = max(n for n in range(1, min(cores, self.shards) + 1) if self.shards % n == 0)
        return self.shards or partitions, partitions, self.splits or cores

    def history_root(self, domain_folder: Path) -> str:
        """The location of the history: a path or a URL."""
        return storage.normalize(self.history_dir or domain_folder / "history")

    def checkpoint_root(self, domain_folder: Path) -> str:
        """The location of Spark's checkpoint: a path or a URL."""
        return storage.normalize(
            self.checkpoint_dir or domain_folder / "pipeline" / "checkpoint",
            setting="checkpoint_dir",
            checkpoint=True,
        )

    def state_folder(self, domain_folder: Path) -> Path:
        """The folder of the alert state and of measured batches: beside a local checkpoint."""
        checkpoint = storage.local_path(self.checkpoint_root(domain_folder))
        return checkpoint.parent if checkpoint is not None else domain_folder / "pipeline"

    def state_root(self, domain_folder: Path) -> str:
        """The location of the alert state, which standbys share: beside a local checkpoint, or in the
        history."""
        if storage.is_local(self.checkpoint_root(domain_folder)):
            return str(self.state_folder(domain_folder))
        return storage.join(self.history_root(domain_folder), "_alerts")

    def spark_settings(self) -> dict[str, str]:
        """The settings of Spark in ``spark``."""
        pairs = [setting.partition("=") for setting in self.spark]
        for name, equals, _ in pairs:
            if not equals or not name.startswith("spark."):
                raise errors.InvalidInput(f"spark: {name[:60]!r} is not spark.NAME=VALUE")
        return {name: value for name, _, value in pairs}

    def __post_init__(self) -> None:
        self.spark_settings()
        storage.normalize(self.history_dir)
        storage.normalize(self.checkpoint_dir, setting="checkpoint_dir", checkpoint=True)
        if self.stale_after * 1.0 < 1:
            raise errors.InvalidInput("stale_after: a machine is not stale before its next report is due")
        if self.partitions and self.shards % self.partitions:
            raise errors.InvalidInput("shards: a multiple of partitions, so that all have as much to do")
        for name in self.top_metrics:
            if name not in columns.STANDARD_METRICS:
                raise errors.InvalidInput(f"top_metrics: {name!r} is no standard metric")
