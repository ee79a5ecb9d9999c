"""Where the package's loggers write: public facts only, such as connected, saved, peer lost."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from dpcsgp.errors import ConfigError

LOG_FILE: Final = "DPCSGP_LOG_FILE"  # in the environment of workers that are to write one
_KEPT: Final = 3  # older log files
_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


def open_logs(verbose: bool, log_file: Path | None, most_bytes: int = 0) -> None:
    """Write log records of the package to stderr (`verbose`), to a file, to both, or nowhere.

    Args:
        verbose: whether to write to stderr.
        log_file: the file to append to; None: none.
        most_bytes: of the file, which is then renamed (`.1`, `.2`, `.3`) and begun anew; 0: no
            limit. Only for a file that one process writes.

    Raises:
        ConfigError: if the file cannot be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if verbose else []
    if log_file is not None:
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(
                RotatingFileHandler(
                    log_file, maxBytes=most_bytes, backupCount=_KEPT, encoding="utf-8"
                )
            )
        except OSError as error:
            raise ConfigError(
                f"--log-file {log_file} cannot be written: {error.strerror}; name another file"
            ) from None
    logger = logging.getLogger("dpcsgp")
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    if handlers:
        logger.setLevel(logging.INFO)
