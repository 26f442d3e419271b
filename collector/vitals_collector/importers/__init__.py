"""Other people's logs, each read into the same records: CSV, Trainer, TensorBoard, wandb."""

from vitals_collector.importers.columns import ColumnChoice, History
from vitals_collector.importers.recognise import holds_runs, read_history

__all__ = ["ColumnChoice", "History", "holds_runs", "read_history"]
