from .config import ASMIConfig as ASMIConfig
from .decisions.calibration import Calibration as Calibration
from .decisions.decider import Decider as Decider
from .decisions.decider import decide as decide
from .decisions.decision import Decision as Decision
from .estimators import ASMI as ASMI
from .estimators import AdaptASMI as AdaptASMI
from .estimators import SemASMI as SemASMI
from .scoring.result import Score as Score
from .scoring.scorer import Scorer as Scorer
from .scoring.scorer import score as score
from .scoring.tables import score_file as score_file
from .stat_calculators.registration import available_stat_calculators as available_stat_calculators
from .stat_calculators.registration import estimate_uncertainty as estimate_uncertainty

__version__: str
