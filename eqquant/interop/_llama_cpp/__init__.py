from ._model import file_type as file_type, ModelFile as ModelFile
from ._pre_tokenizer import splitting as splitting
from ._tables import Tables as Tables
