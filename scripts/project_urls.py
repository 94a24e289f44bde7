"""Hook of hatchling: the URLs of the project are those of the repository that a package is built from.

GitHub's runners name it (GITHUB_SERVER_URL, GITHUB_REPOSITORY). So a bug of a fork's package is reported to the fork. A
package that is built elsewhere has no address.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("GITHUB_REPOSITORY")
        if repository:
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            pages = {"Issues": "issues", "Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md"}
            metadata["urls"] = {"Repository": home} | {name: f"{home}/{page}" for name, page in pages.items()}
