"""Configuration files of users as Hydra reads them, but checked first: one must not keep it busy for ever."""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from gpipe_cli.config.settings import check_yaml
from gpipe_cli.config.typed import one_line


class CheckedFiles(FileConfigSource):
    """What Hydra reads files by."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():  # or else Hydra says so
            check_yaml(file)
        try:
            return super().load_config(config_path)
        except OSError as error:  # it says so of a file that holds a number
            raise ValueError(f"{file}: holds no settings ({one_line(error)}); write lines key: value") from error


def check_config_files() -> None:
    """Has Hydra check files before it reads them."""
    Plugins.instance()  # which registers Hydra's own way first
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = CheckedFiles
