"""Messages of the libraries below that help nobody who runs ``train.py``."""

import logging
import warnings

UNHELPFUL_WARNINGS = (
    # Lightning's own use of a torch function that torch has renamed.
    r".*isinstance\(treespec, LeafSpec\).*",
    # Evaluation needs none of the callbacks that training had.
    r".*callbacks used to create the checkpoint need to be provided.*",
    # A resumed run goes on in its own folder, on purpose.
    r".*Checkpoint directory .* exists and is not empty.*",
    # The metrics are sums over ranks already.
    r".*It is recommended to use `self.log\(.*sync_dist=True\)`.*",
    # Batches are built by slicing a memory map; workers are a choice (data.num_workers).
    r".*does not have many workers.*",
)
ADVERTISEMENT = " Tip: For seamless"


def silence() -> None:
    """Leaves these messages out, for the rest of the process."""
    for pattern in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if _no_advertisement not in logger.filters:
        logger.addFilter(_no_advertisement)


def _no_advertisement(record: logging.LogRecord) -> bool:
    return ADVERTISEMENT not in record.getMessage()
