from ._file_type import file_type as file_type
from ._model import ModelFile as ModelFile
