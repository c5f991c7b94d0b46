from ._load import load as load
from ._save import save as save
