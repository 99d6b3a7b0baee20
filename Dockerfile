# The image that `cargo xtask image` makes without a container engine:  docker build --tag sheave .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# Finds or installs what the kernel side needs, builds, and lays the files out as they are in the image.
RUN cargo xtask image --rootfs /image

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/local/bin
LABEL org.opencontainers.image.title="sheave" \
      org.opencontainers.image.description="A kube-proxy replacement for any CNI" \
      org.opencontainers.image.licenses="(Apache-2.0 OR MIT) AND (MIT OR GPL-2.0-only)" \
      org.opencontainers.image.source="https://github.com/sheave-lb/sheave" \
      org.opencontainers.image.version="0.1.0"
ENTRYPOINT ["/usr/local/bin/sheave"]
CMD ["agent"]
