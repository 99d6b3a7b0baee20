//! Tells events on objects of the cluster.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, ObjectReference, Service};
use kube::{
    Api, Client, Resource as _,
    runtime::events::{Event as Note, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc::UnboundedReceiver;

use super::kube::Cluster;
use crate::{
    model::ServiceName,
    observe::events::{Event, Subject},
};

/// Posts what is told. An event that cannot be posted is left out: it was logged as well, and nothing depends on it. That
/// none are wanted here is said once.
pub async fn post(cluster: Arc<Cluster>, node: String, mut events: UnboundedReceiver<Event>) {
    let reporter = Reporter { controller: "sheave".to_owned(), instance: Some(node) };
    let mut has_warned = false;
    while let Some(event) = events.recv().await {
        match post_one(&cluster, &reporter, &event).await {
            Err(kube::Error::Api(status)) if status.code == FORBIDDEN && !has_warned => {
                has_warned = true;
                tracing::warn!(
                    reason = status.message,
                    "the API server does not take every event from this agent: let its account create and patch them, with the \
                     chart by rbac.events=node, or on Services too by rbac.events=services"
                );
            }
            Err(error) => tracing::debug!(%error, ?event, "cannot post an event"),
            Ok(()) => {}
        }
    }
}

/// HTTP's.
const FORBIDDEN: u16 = 403;

async fn post_one(cluster: &Cluster, reporter: &Reporter, event: &Event) -> Result<(), kube::Error> {
    let Event { subject, is_warning, reason, action, message } = event;
    let client = cluster.current().client;
    let object = match subject {
        Subject::Service(name) => service(client.clone(), name).await?,
        // `kubectl describe node` looks for the name in place of the uid, as kubelet and kube-proxy write it.
        Subject::Node => ObjectReference {
            name: reporter.instance.clone(),
            uid: reporter.instance.clone(),
            ..Node::default().object_ref(&())
        },
    };
    let note = Note {
        type_: if *is_warning { EventType::Warning } else { EventType::Normal },
        reason: (*reason).to_owned(),
        note: Some(message.clone()),
        action: (*action).to_owned(),
        secondary: None,
    };
    Recorder::new(client, reporter.clone()).publish(&note, &object).await
}

/// `kubectl describe` finds events by the uid of the object, which the model does not keep.
async fn service(client: Client, name: &ServiceName) -> Result<ObjectReference, kube::Error> {
    let object = Api::<Service>::namespaced(client, &name.namespace).get_metadata(&name.name).await?;
    Ok(ObjectReference {
        namespace: Some(name.namespace.to_string()),
        name: Some(name.name.to_string()),
        uid: object.metadata.uid,
        ..Service::default().object_ref(&())
    })
}
