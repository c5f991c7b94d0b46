"""Tools to inspect quantized models: the size and error of each array (`report`), the
kernels that run (`audit`, `explain`), the table of formats, the error of each weight in
each format (`sensitivity`), and the loss of language models (`evaluate`).

May import `train`, `_tree`, `_solvers` and the rooms below them, and rich where a table
is printed.
"""

from ._allocation import Sensitivity as Sensitivity, SensitivityRow as SensitivityRow
from ._audit import Audit as Audit, audit as audit, Operand as Operand
from ._evaluate import evaluate as evaluate, Evaluation as Evaluation
from ._explain import explain as explain, Explanation as Explanation
from ._formats import (
    format_table as format_table,
    FormatRow as FormatRow,
    FormatTable as FormatTable,
    read_losses as read_losses,
)
from ._predictions import Predictions as Predictions, predictions as predictions
from ._print import Row as Row, Total as Total
from ._report import Report as Report, report as report
from ._sensitivity import allocate as allocate, sensitivity as sensitivity
from ._squared_gradients import squared_gradients as squared_gradients
from ._uses import Use as Use
