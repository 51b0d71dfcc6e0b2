"""The S3 tier's configuration, and what it needs of this machine."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from nixl_tiers.config import fields
from nixl_tiers.config.errors import ConfigError
from nixl_tiers.config.tier import AbsolutePath, Age, Size, StorageConfig, when_unset


class S3Config(StorageConfig):
    """A prefix of a bucket. Without any credential field: the usual AWS chain."""

    type: Literal["s3"] = Field(description="kind of the tier")
    bucket: Annotated[str, BeforeValidator(fields.bucket)] = Field(description="name of the bucket")
    prefix: Annotated[str, BeforeValidator(fields.prefix)] = Field(
        "nixl-tiers",
        description="prefix of the tier's objects in the bucket",
    )
    endpoint: Annotated[str | None, BeforeValidator(fields.endpoint)] = Field(
        None,
        description="URL of the server, `http:` or `https:`",
        json_schema_extra=when_unset("AWS"),
    )
    region: Annotated[str | None, BeforeValidator(fields.region)] = Field(
        None,
        description="region that requests are signed for",
        json_schema_extra=when_unset("AWS_REGION, AWS_DEFAULT_REGION, the profile's, or the bucket's own"),
    )
    capacity: Size = Field(
        description="budget of all rows under `prefix`, of all engines and namespaces; the same in each engine"
    )
    max_age: Age = None
    profile: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None,
        description="profile in AWS's configuration files that has the credentials",
    )
    credentials_file: AbsolutePath | None = Field(
        None,
        description="file that has the credentials, in the format of AWS's `credentials` file",
    )
    ca_file: AbsolutePath | None = Field(None, description="certificates (PEM) that verify the endpoint")

    implementation: ClassVar[str] = "nixl_tiers.tiers.s3.tier:S3Tier"
    stored_rows: ClassVar[str] = "nixl_tiers.tiers.s3.stored:find"
    locality: ClassVar[Literal["LOCAL", "REMOTE"]] = "REMOTE"

    @property
    def place(self) -> str:
        return f"s3://{self.bucket}/{self.prefix} at {self.endpoint or 'AWS'}"

    @property
    def identity(self) -> str:
        return self.place

    @property
    def asked(self) -> bool:
        return True

    def shares_place(self, other: StorageConfig) -> bool:
        if not isinstance(other, S3Config) or (self.endpoint, self.bucket) != (other.endpoint, other.bucket):
            return False
        return f"{self.prefix}/".startswith(f"{other.prefix}/") or f"{other.prefix}/".startswith(f"{self.prefix}/")

    def check_here(self, *, starting: bool) -> None:
        for field in ("credentials_file", "ca_file"):
            path = getattr(self, field)
            if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
                raise ConfigError(f"{field}: there is no readable file at {path}")
        super().check_here(starting=starting)

    @model_validator(mode="after")
    def _agree(self) -> S3Config:
        if self.profile is not None and self.credentials_file is not None:
            raise ValueError("profile and credentials_file are different ways to find credentials; give one")
        if self.ca_file and self.endpoint and self.endpoint.startswith("http:"):
            raise ValueError("ca_file has no use with an endpoint that begins with http:")
        return self
