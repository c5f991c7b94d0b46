from ._file_type import file_type as file_type
from ._model import ModelFile as ModelFile
from ._pre_tokenizer import splitting as splitting
from ._tables import Tables as Tables
