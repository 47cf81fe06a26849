from .call import score as score
from .division import Span as Span
from .reference import Reference as Reference
from .result import Score as Score
from .result import Token as Token
