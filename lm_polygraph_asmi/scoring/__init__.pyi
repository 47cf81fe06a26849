from .calibration import calibrate_rows as calibrate_rows
from .calibration import calibrate_run as calibrate_run
from .call import score as score
from .decision import Decision as Decision
from .division import Span as Span
from .reference import Reference as Reference
from .result import Score as Score
from .result import Token as Token
