//! Tells events on objects of the cluster.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use kube::{
    Api, Resource as _,
    runtime::events::{Event as Note, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc::UnboundedReceiver;

use super::kube::Cluster;
use crate::events::Event;

/// Posts what is told. An event that cannot be posted is left out: it was logged as well, and nothing depends on it.
pub async fn post(cluster: Arc<Cluster>, node: String, mut events: UnboundedReceiver<Event>) {
    let reporter = Reporter { controller: "sheave".to_owned(), instance: Some(node) };
    while let Some(event) = events.recv().await {
        if let Err(error) = post_one(&cluster, &reporter, &event).await {
            tracing::debug!(%error, service = %event.service, "cannot post an event");
        }
    }
}

async fn post_one(cluster: &Cluster, reporter: &Reporter, event: &Event) -> Result<(), kube::Error> {
    let Event { service, reason, action, message } = event;
    let client = cluster.current().client;
    // `kubectl describe` finds events by the uid of the object, which the model does not keep.
    let object: ObjectReference = Api::<Service>::namespaced(client.clone(), &service.namespace)
        .get_metadata(&service.name)
        .await
        .map(|object| ObjectReference { uid: object.metadata.uid, ..Service::default().object_ref(&()) })?;
    let object = ObjectReference {
        namespace: Some(service.namespace.to_string()),
        name: Some(service.name.to_string()),
        ..object
    };
    let note = Note {
        type_: EventType::Warning,
        reason: (*reason).to_owned(),
        note: Some(message.clone()),
        action: (*action).to_owned(),
        secondary: None,
    };
    Recorder::new(client, reporter.clone()).publish(&note, &object).await
}
