"""Results folders in, figures and one self-contained page out; never training objects."""

from dpcsgp.report.figures import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.report.page import write_report

__all__ = ["Curve", "accuracy_panels", "save_figure", "write_csv", "write_report"]
