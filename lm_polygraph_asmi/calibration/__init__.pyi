from .calibration import Calibration as Calibration
from .decider import BatchDecider as BatchDecider
from .decider import Decider as Decider
from .decider import DecisionStream as DecisionStream
from .decider import decide as decide
from .decision import Decision as Decision
from .rows import calibrate_rows as calibrate_rows
from .run import calibrate_run as calibrate_run
