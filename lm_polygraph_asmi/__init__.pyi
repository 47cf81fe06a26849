from .calibration import Calibration as Calibration
from .calibration import Decider as Decider
from .calibration import Decision as Decision
from .calibration import decide as decide
from .config import ASMIConfig as ASMIConfig
from .estimators import ASMI as ASMI
from .estimators import AdaptASMI as AdaptASMI
from .estimators import SemASMI as SemASMI
from .scoring import Score as Score
from .scoring import Scorer as Scorer
from .scoring import score as score
from .scoring import score_batch as score_batch
from .scoring import stream as stream
from .stat_calculators.registration import available_stat_calculators as available_stat_calculators

__version__: str
